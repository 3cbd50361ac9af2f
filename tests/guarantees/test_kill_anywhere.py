"""G2: a run that is killed at random instants, also inside saves, ends as the one that was left alone.

`make chaos N=1000` kills that often over all of these; here it is a few times each.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.chaos import SEED, report, share
from support.patience import patience
from support.processes import ProcessFailure, free_port, run_outcomes, run_processes
from support.saves import litter
from support.stacks import copied, needs_deepspeed, zero
from support.toys import TracingRunner, differences, whole_settings, whole_state
from torch import Tensor

import danling as dl
from danling.cli.verify import verify


class SlowRunner(TracingRunner, dl.Runner):
    """Takes its time over a step on any stack, so that a kill meets it at work."""

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        time.sleep(0.03)
        return super().train_step(data)


def settings(
    root: Path, backend: str, mode: str, axes: dict[str, int] | None = None
) -> dict[str, Any]:
    """Return a configuration of a few steps that saves in every one of them: what a kill costs is mostly the training around it."""
    layout = {"stack": "parallel", "parallel": {"axes": axes}} if axes else {}
    policy = {"backend": backend, "async_mode": mode, "interval": 1, "keep_latest_k": 3}
    return whole_settings(
        root, **layout, steps=12, evaluate_interval=5, auto_resume=True, checkpoint=policy
    )


def engine_settings(root: Path, stage: int) -> dict[str, Any]:
    """The same for DeepSpeed."""
    policy = {"interval": 1, "keep_latest_k": 2}
    layout = {"stack": "deepspeed", "deepspeed": zero(stage)}
    return whole_settings(
        root, **layout, steps=12, evaluate_interval=5, auto_resume=True, checkpoint=policy
    )


def train(config: dict[str, Any]) -> dict[str, Any]:
    with SlowRunner(config) as runner:
        runner.train()
        return copied(whole_state(runner))


class KilledRuns:
    """Runs of one configuration that are killed at random instants, and what they are compared with: the one that is left alone."""

    def __init__(
        self, make: Callable[[Path], dict[str, Any]], *, world_size: int, place: Path, what: str
    ) -> None:
        self._make, self._world_size, self._place, self._what = make, world_size, place, what
        run_processes(
            free_port, world_size=world_size
        )  # what the first processes of a session have to load
        start = time.monotonic()
        self._alone = self._train(place / "alone")
        self._lasted = time.monotonic() - start
        self._instants = random.Random(f"{what} {SEED}")

    def _train(self, root: Path) -> list[dict[str, Any]]:
        return run_processes(train, self._make(root), world_size=self._world_size, timeout=300)

    def go_on_to_the_end(self, kills: int) -> int:
        """Start one again and again, kill it that often at most, let it end, and look at what is there then.

        Returns:
            How often it was killed.
        """
        root, done = self._place / "killed", 0
        while done < kills:
            # The harness waits longer on a busy machine; what the run that was left alone took has that in it already.
            seconds = self._instants.uniform(0.1, 0.5) * self._lasted / patience(1)
            outcomes = run_outcomes(
                train, self._make(root), world_size=self._world_size, timeout=seconds
            )
            if all(outcome.error is None for outcome in outcomes):
                break
            assert all(
                outcome.error is None or isinstance(outcome.error, ProcessFailure)
                for outcome in outcomes
            ), outcomes
            done += 1
        for ended, alone in zip(self._train(root), self._alone, strict=True):
            assert differences(ended, alone) == []
        assert litter(root) == []
        (checkpoints,) = root.rglob("checkpoints")
        assert not [verdict for verdict in verify(checkpoints, "full") if verdict["problems"]]
        shutil.rmtree(root)
        # After each end, so that a report that is cut short has its figures.
        report(self._what, done, 1)
        return done


slow, needs_engine = pytest.mark.slow, [pytest.mark.slow, needs_deepspeed]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("part", "world_size", "make", "how"),
    [
        (0.10, 1, settings, ("file", "disabled")),
        pytest.param(0.10, 2, settings, ("file", "async"), marks=slow),
        (0.08, 2, settings, ("dcp", "async", {"shard": 2})),
        pytest.param(0.07, 2, settings, ("dcp", "disabled"), marks=slow),
        pytest.param(0.07, 2, settings, ("dcp", "async"), marks=slow),
        pytest.param(0.02, 2, settings, ("dcp", "async_with_pinned_mem"), marks=slow),
        pytest.param(0.03, 2, settings, ("dcp", "async", {"pipeline": 2}), marks=slow),
        pytest.param(0.015, 2, engine_settings, (1,), marks=needs_engine),
        pytest.param(0.015, 2, engine_settings, (3,), marks=needs_engine),
    ],
)
def test_killed_again_and_again(
    part: float,
    world_size: int,
    make: Callable[..., dict[str, Any]],
    how: tuple[Any, ...],
    tmp_path: Path,
) -> None:
    words = ("DeepSpeed, ZeRO", *how) if make is engine_settings else how
    what = f"at random instants: {', '.join(map(str, words))}, {world_size} processes"
    kills, done = share(part, otherwise=2), 0
    runs = KilledRuns(
        lambda root: make(root, *how), world_size=world_size, place=tmp_path, what=what
    )
    while done < kills:
        # When a run has ended with kills left, the next one begins.
        done += runs.go_on_to_the_end(kills - done)
    assert done == kills
