"""G11: between two log lines an update opens no file and makes one collective beside the gradient; a pass begins with one more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.processes import run_processes
from support.toys import TracingRunner, settings

PASS = 6
"""Updates of a pass."""
VERBS = (
    "all_reduce",
    "all_gather_object",
    "broadcast_object_list",
    "broadcast",
    "barrier",
    "all_gather_into_tensor",
)


class Watched(TracingRunner):
    """Notes at every update what has been opened and called since the one before."""

    not_saved = ("by_update", "events")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.events: list[str] = []
        self.by_update: list[list[str]] = []

    def step(self) -> Any:
        outcome = super().step()
        self.by_update.append(self.events[:])
        self.events.clear()
        return outcome


def train_watched(root: str) -> list[list[str]]:
    often = {"log_interval": 8, "evaluate_interval": 24, "checkpoint.interval": 24}
    more = {
        "steps": 24,
        "log": True,
        "tensorboard": True,
        "max_grad_norm": 1.0,
        "dataloader": {"batch_size": 2},
    }
    config = settings(root, **often, **more)
    with Watched(config) as runner:
        sys.addaudithook(
            lambda event, _: (
                runner.events.append(event) if event in ("open", "os.listdir") else None
            )
        )
        for verb in VERBS:
            setattr(dist, verb, counted(getattr(dist, verb), runner.events, verb))
        runner.train()
        return runner.by_update


def counted(verb: Any, events: list[str], name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        events.append(name)
        return verb(*args, **kwargs)

    return call


def test_nothing_happens_between_two_log_lines_but_the_vote(tmp_path: Path) -> None:
    for by_update in run_processes(train_watched, str(tmp_path), world_size=2):
        # The first updates start the groups and the reader; the line of the eighth is written behind it, at the ninth.
        for step in (*range(3, 8), *range(10, 16), *range(18, 24)):
            begins = step > 1 and (step - 1) % PASS == 0
            assert by_update[step - 1] == [*["all_gather_object"] * begins, "all_reduce"], (
                f"update {step}"
            )
        assert len(by_update[8]) > 1
