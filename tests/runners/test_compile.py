"""What `compile.enable` makes of the models that people have, on every stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.gpt import GPT
from support.processes import run_processes
from support.stacks import needs_deepspeed, zero
from support.toys import settings
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def gpt() -> nn.Module:
    model: nn.Module = GPT(11, context=8, width=8, depth=2, heads=2)
    return model


INPUTS: dict[Callable[[], nn.Module], torch.Size] = {
    sequential: torch.Size([8]),
    encoder: torch.Size([5, 8]),
    gpt: torch.Size([8]),
}


class Counted(dl.Runner):
    """Trains a model towards nothing in particular, and looks at the compiler's own count of graphs."""

    def __init__(self, config: Any, build: Callable[[], nn.Module]) -> None:
        super().__init__(config)
        self.model = build()
        self.criterion = lambda pred, _: pred.square().mean()
        inputs = torch.rand(8, *INPUTS[build])
        if build is gpt:
            inputs = (inputs * 11).long()
        self.datasets = {"train": TensorDataset(inputs, torch.zeros(8))}


def config(root: Path, **changes: Any) -> dict[str, Any]:
    compiled = {"enable": True, "backend": "eager"}
    return settings(
        root / "run",
        **{"steps": 2, "dataloader": {"batch_size": 2}, "compile": compiled, **changes},
    )


def train(settings: dict[str, Any], build: Callable[[], nn.Module]) -> tuple[int, list[str], Any]:
    """Return the number of graphs, the keys of the model, and what the process has for `optimize_ddp` afterwards."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    with Counted(settings, build) as runner:
        runner.train()
        keys = list(runner.model_state_dict())
    return counters["stats"]["unique_graphs"] - before, keys, dynamo.config.optimize_ddp


@pytest.mark.parametrize("build", list(INPUTS), ids=lambda build: build.__name__)
def test_every_model_becomes_one_graph_and_keeps_its_names(build: Any, tmp_path: Path) -> None:
    compiled = {"enable": True, "backend": "eager", "fullgraph": True, "dynamic": False}
    graphs, keys, _ = train(config(tmp_path, compile=compiled), build)
    assert graphs == 1 and keys == list(build().state_dict())


def train_each(
    cases: list[tuple[dict[str, Any], Callable[[], nn.Module]]],
) -> list[tuple[int, list[str], Any]]:
    return [train(*case) for case in cases]


def test_every_rank_of_every_stack_has_graphs(tmp_path: Path) -> None:
    whole = {"enable": True, "backend": "eager", "optimize_ddp": "no_optimization"}
    shard, pipeline = (
        {"stack": "parallel", "parallel": {"axes": {axis: 2}}} for axis in ("shard", "pipeline")
    )
    cases = [
        (config(tmp_path / "ddp", compile=whole), sequential),
        (config(tmp_path / "shard", **shard), encoder),
        (config(tmp_path / "pipeline", **pipeline), sequential),
    ]
    ranks = run_processes(train_each, cases, world_size=2)
    for (_, build), *found in zip(cases, *ranks):
        assert all(graphs >= 1 for graphs, _, _ in found)
        assert {key for _, keys, _ in found for key in keys} == set(build().state_dict())
        assert all(setting is True for *_, setting in found), "the setting of the process"


@needs_deepspeed
@pytest.mark.timeout(120)
def test_engine_calls_the_compiled_model(tmp_path: Path) -> None:
    settings = config(tmp_path, stack="deepspeed", deepspeed=zero(1))
    ((graphs, keys, _),) = run_processes(train, settings, sequential, world_size=1, timeout=90)
    assert graphs >= 1 and keys == list(sequential().state_dict())


def test_the_options_of_a_second_runner_are_its_own(tmp_path: Path) -> None:
    counted = []
    for dynamic in (False, True):
        compiled = {"enable": True, "backend": "eager", "dynamic": dynamic}
        settings = config(tmp_path / str(dynamic), compile=compiled, steps=None, epochs=1)
        settings["dataloader"] = {"batch_size": 5, "drop_last": False}
        counted.append(train(settings, sequential)[0])
    assert counted == [2, 1]
