"""A stream on meshes: every rank of a group that computes together gets the same samples, and the result is that of one process (1e-9)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layouts import LayoutRunner, Sentences
from support.processes import run_processes
from torch import Tensor

from danling.stream import (
    DirectoryStore,
    Sample,
    SampleRef,
    SQLiteChannel,
    StreamLoader,
    TensorSpec,
)
from danling.utils.tensors import canonical_name, whole

SAMPLES = 21
"""Two updates of eight and a last one of five."""

LAYOUTS: dict[str, tuple[int, Mapping[str, int]]] = {
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "tensor x shard": (4, {"tensor": 2, "shard": 2}),
    "pipeline x tensor": (4, {"pipeline": 2, "tensor": 2}),
}
USUAL = ("tensor", "context")


class StreamedLayout(LayoutRunner):
    """Trains on sentences from a stream, and writes down which ones this rank reads of each update."""

    not_saved = ("read",)

    def __init__(self, config: Mapping[str, Any], root: Path, batch_size: int) -> None:
        super().__init__(config, model={})
        del self.datasets["train"]
        store, channel = DirectoryStore(root / "store"), SQLiteChannel(root / "log.sqlite")
        loader = StreamLoader(
            store, channel, batch_size, collate_fn=self.collate, prefetch=0, idle_timeout=60
        )
        self.dataloaders = {"train": loader}
        self.read: list[tuple[int, list[int]]] = []

    def collate(self, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        self.read.append((self.state.train.global_step, [int(sample.ref.id) for sample in samples]))
        return torch.stack([sample["tokens"] for sample in samples]), torch.stack(
            [sample["target"] for sample in samples]
        )


def train(root: Path, axes: Mapping[str, int], batch_size: int) -> dict[str, Any]:
    """Train as one rank to the end of the stream."""
    config: dict[str, Any] = {
        "dir": str(root / "run"),
        "seed": 5,
        "steps": 100,
        "accum_steps": 2,
        "max_grad_norm": 0.05,
        "log": False,
        "optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
        "checkpoint": {"interval": 2, "async_enabled": False},
        "dataloader": {"batch_size": 11},
        **({"stack": "parallel", "parallel": {"axes": dict(axes)}} if axes else {}),
    }
    with StreamedLayout(config, root, batch_size) as runner:
        runner.train()
        weights = {
            canonical_name(name): whole(value).clone()
            for name, value in runner.model_state_dict().items()
        }
        placement = runner.placement
        return {
            "weights": weights,
            "norms": runner.norms,
            "results": runner.results,
            "read": runner.read,
            "share": placement.data.rank,
            "reads": placement.reads_data,
            "done": (runner.state.train.global_step, runner.state.train.samples),
        }


def complete_stream(root: Path) -> Path:
    """Put a complete stream below a directory."""
    store, channel, sentences = (
        DirectoryStore(root / "store"),
        SQLiteChannel(root / "log.sqlite"),
        Sentences(SAMPLES),
    )
    for index in range(SAMPLES):
        features = dict(zip(("tokens", "target"), sentences[index]))
        store.put(str(index), features)
        specs = {name: TensorSpec.of(tensor) for name, tensor in features.items()}
        channel.append([SampleRef(str(index), str(index), specs)])
    channel.end()
    channel.close()
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = complete_stream(tmp_path_factory.mktemp("alone"))
    one: dict[str, Any]
    (one,) = run_processes(train, root, {}, 4, world_size=1)
    assert one["done"] == (3, SAMPLES)
    return one


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_stream_on_a_mesh_equals_the_stream_of_one_process(
    tmp_path: Path, alone: dict[str, Any], name: str
) -> None:
    world, axes = LAYOUTS[name]
    shares = axes.get("shard", 1)
    ranks = run_processes(
        train, complete_stream(tmp_path), axes, 4 // shares, world_size=world, timeout=120
    )
    # Every rank of a group that computes together reads the same samples in the same order; over the groups each is read once.
    groups: dict[int, Any] = {}
    for rank in ranks:
        assert rank["done"] == alone["done"]
        assert rank["norms"] == pytest.approx(alone["norms"], abs=1e-9)
        if rank["reads"]:
            assert groups.setdefault(rank["share"], rank["read"]) == rank["read"]
        assert rank["results"].keys() == alone["results"].keys() == {2, 3}
        assert rank["results"][3]["val"]["loss"] == pytest.approx(
            alone["results"][3]["val"]["loss"], abs=1e-9
        )
    assert len(groups) == shares
    for step, window in enumerate((range(8), range(8, 16), range(16, SAMPLES))):
        seen = {
            index for read in groups.values() for at, ids in read if at == step for index in ids
        }
        assert seen == set(window)
    found: dict[str, Tensor] = {
        key: value for rank in ranks for key, value in rank["weights"].items()
    }
    assert found.keys() == alone["weights"].keys()
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(found[key], weight, rtol=0, atol=1e-9)
    channel = SQLiteChannel(tmp_path / "log.sqlite")
    assert channel.committed() == SAMPLES and DirectoryStore(tmp_path / "store").usage() == 0
    channel.close()
