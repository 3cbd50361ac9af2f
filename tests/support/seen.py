"""What a run is fed, by a dataset of some library: of a run that is left alone, and of one that is stopped and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import danling as dl


class Seeing(dl.Runner):
    """A runner that writes down what it trains on, and stops where it is told."""

    not_saved = ("seen",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.seen: list[Any] = []
        self.stop_at: int | None = None

    def values(self, data: Any) -> list[Any]:
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        self.seen += self.values(data)
        return super().train_step(data)

    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.train_state.global_step + 1 == self.stop_at:
            self.stop()


def seen(
    make: Callable[[dict[str, Any]], Seeing],
    directory: Path,
    *,
    workers: int = 0,
    stop: int | None = None,
    samples: int | None = None,
    **length: int,
) -> list[Any]:
    """Train, from the newest checkpoint of the directory where it has one, and return what was trained on."""
    config: dict[str, Any] = {
        "seed": 1,
        "log": False,
        "dir": str(directory),
        "auto_resume": True,
        **length,
    }
    config |= {
        "optim": {"type": "sgd", "lr": 1e-6},
        "dataloader": {"batch_size": 4, "num_workers": workers},
    }
    with make(config) as runner:
        runner.stop_at = stop
        runner.train()
        assert stop is not None or samples in (None, runner.train_state.samples)
        return runner.seen


def assert_goes_on_alike(
    make: Callable[[dict[str, Any]], Seeing], directory: Path, *, workers: int
) -> None:
    """Train 14 updates of a pass of 6 without a stop, and in two parts by other workers: the same tensors, and others in each pass."""
    whole = seen(make, directory / "whole", steps=14)
    parts = [seen(make, directory / "parts", workers=workers, steps=steps) for steps in (5, 14)]
    assert len(whole) % 14 == 0 and len(whole) == len(parts[0]) + len(parts[1])
    assert all(map(torch.equal, [*parts[0], *parts[1]], whole))
    assert not torch.equal(whole[0], whole[6 * len(whole) // 14])
