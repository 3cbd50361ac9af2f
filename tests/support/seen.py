"""What a run is fed, by a dataset of some library: of a run that is left alone, and of one that is stopped and resumed.

class Augmented(Seeing):
    def values(self, data):
        return [data[0].clone()]

whole = seen(Augmented, tmp_path / "whole", steps=14)
parts = [*seen(Augmented, tmp_path / "parts", steps=5), *seen(Augmented, tmp_path / "parts", steps=14)]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import danling as dl


class Seeing(dl.Runner):
    """A runner that writes down what it trains on, and stops where it is told."""

    not_saved = ("seen",)

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.seen: list[Any] = []
        self.stop_at: int | None = None

    def values(self, data: Any) -> list[Any]:
        """Return what is compared of a batch."""
        raise NotImplementedError

    def train_step(self, data: Any) -> Any:
        """Note the batch, then train as usual."""
        self.seen += self.values(data)
        return super().train_step(data)

    def optimizer_step(self) -> None:
        """Ask for a stop with the update that is to be the last one."""
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
    config: dict[str, Any] = {"seed": 1, "log": False, "dir": str(directory), "auto_resume": True, **length}
    config |= {"optim": {"type": "sgd", "lr": 1e-6}, "dataloader": {"batch_size": 4, "num_workers": workers}}
    with make(config) as runner:
        runner.stop_at = stop
        runner.train()
        assert stop is not None or samples in (None, runner.train_state.samples)
        return runner.seen
