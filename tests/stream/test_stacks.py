"""A stream on every stack: stopped, resumed, ragged at its end, and nothing left in the store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import STACKS
from support.streams import Stopped, publish, settings
from torch import Tensor, nn

import danling as dl
from danling.stream import DirectoryStore, SQLiteChannel, StreamLoader
from danling.utils.tensors import canonical_name, whole

SAMPLES = 21
LAYOUTS: dict[str, Mapping[str, Any]] = {
    **{name: stack.settings for name, stack in STACKS.items()},
    "pipeline": {"stack": "parallel", "parallel": {"axes": {"pipeline": 2}}},
}
USUAL = ("parallel", "pipeline")


class AnyDraft(dl.Runner):
    """A draft on any stack."""

    def __init__(self, config: Mapping[str, Any], root: Path, *, stop_at: int | None) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        )
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        store, channel = DirectoryStore(root / "store"), SQLiteChannel(root / "log.sqlite")
        self.dataloaders = {
            "train": StreamLoader(store, channel, 2, global_batch_size=4, idle_timeout=60)
        }
        self.stop_at = stop_at

    def to_device(self, data: Any) -> Any:
        if self.state.train.global_step == self.stop_at:
            raise Stopped
        return super().to_device(data)


def train(
    root: Path, layout: Mapping[str, Any], stop_at: int | None
) -> tuple[dict[str, Tensor], int, int]:
    """Train as one rank; return the weights, updates and samples."""
    saves = {"interval": 2, "async_enabled": False}
    config = settings(root / "draft", steps=6, accum_steps=1, checkpoint=saves, **layout)
    runner = AnyDraft(config, root, stop_at=stop_at)
    with suppress(Stopped), runner:
        runner.train()
        weights = {
            canonical_name(name): whole(value).clone()
            for name, value in runner.model_state_dict().items()
        }
        return weights, runner.state.train.global_step, runner.state.train.samples
    return {}, runner.state.train.global_step, runner.state.train.samples


def complete_stream(root: Path) -> None:
    """Put a complete stream below a directory."""
    channel = SQLiteChannel(root / "log.sqlite")
    publish(DirectoryStore(root / "store"), channel, range(SAMPLES))
    channel.close()


@pytest.mark.parametrize(
    "name",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_a_stream_on_two_ranks_of_every_stack(tmp_path: Path, name: str) -> None:
    if name in STACKS and not STACKS[name].is_here:
        pytest.skip(f"{STACKS[name].package} is not installed")
    for kind in ("alone", "two"):
        complete_stream(tmp_path / kind)
    expected, updates, samples = train(tmp_path / "alone", {}, None)
    assert (updates, samples) == (6, SAMPLES)
    stopped = run_processes(train, tmp_path / "two", LAYOUTS[name], 3, world_size=2, timeout=120)
    assert {steps for _, steps, _ in stopped} == {3}
    ranks = run_processes(train, tmp_path / "two", LAYOUTS[name], None, world_size=2, timeout=120)
    found: dict[str, Tensor] = {}
    for weights, steps, counted in ranks:
        assert (steps, counted) == (6, SAMPLES)
        found.update(weights)
    for key, weight in expected.items():
        torch.testing.assert_close(found[key].float(), weight, rtol=1e-4, atol=1e-5)
    channel = SQLiteChannel(tmp_path / "two" / "log.sqlite")
    assert channel.committed() == SAMPLES
    assert DirectoryStore(tmp_path / "two" / "store").usage() == 0
    channel.close()
