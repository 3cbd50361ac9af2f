"""What looks at a rank of a torch runner, without a runner: which functions are what, and where a hang is written down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from inspect import Parameter, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.patience import patience

from danling.config import RunnerConfig
from danling.distributed import LocalDomain, Placement
from danling.reporting.telemetry import Telemetry
from danling.runners.state import RunnerState
from danling.runners.watching import build_rank_watch
from danling.supervision import RankWatch
from danling.training.evaluation import Evaluator
from danling.training.loop import TrainingLoop
from danling.training.saving import RunSaver


class Watched:
    """What a watch asks of a runner; its own save is what a user has overridden."""

    is_main_process = True

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.config = RunnerConfig({"steps": 4, **settings})
        self.placement, self.state = Placement.alike(LocalDomain()), RunnerState()
        self.device, self.workspace = torch.device("cpu"), SimpleNamespace(dir=directory)
        self._session = SimpleNamespace(training=3)
        self.watch: RankWatch = self.build()

    def build(self, samples: bool = True) -> RankWatch:
        return build_rank_watch(self, samples=samples)  # type: ignore[arg-type]

    def look(self, *_: object, **__: object) -> str:
        return self.watch.sampler.look()

    def save_checkpoint(self) -> str:
        return self.look()


def test_what_of_a_training_is_what(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    assert run.look() == "computing"
    assert run.save_checkpoint() == "checkpointing"

    def batches() -> Iterator[str]:
        while True:
            yield run.look()

    assert next(Telemetry().timed(batches())) == "data"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (RunSaver.save, "checkpointing"),
        (RunSaver.export, "checkpointing"),
        (Evaluator.evaluate, "evaluating"),
        (Evaluator.try_once, "evaluating"),
        (TrainingLoop._evaluate, "evaluating"),
        (TrainingLoop._save_if_due, "checkpointing"),
        (TrainingLoop._finish, "checkpointing"),
    ],
)
def test_a_function_of_the_library_is_known_by_its_code(function: Any, expected: str, tmp_path: Path) -> None:
    run, seen = Watched(tmp_path), []

    class Anything:
        """Stands for whatever the function works on: the first thing that is asked of it is looked at."""

        def __getattr__(self, name: str) -> Any:
            seen.append(run.look())
            raise LookupError(name)

    wanted = [each for each in signature(function).parameters.values() if each.default is Parameter.empty]
    by_name = {each.name: Anything() for each in wanted if each.kind is Parameter.KEYWORD_ONLY}
    with pytest.raises(LookupError):
        function(*[Anything()] * (len(wanted) - len(by_name)), **by_name)
    assert seen == [expected]


def test_a_rank_is_looked_at_less_where_nobody_learns_of_it(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    assert run.build(samples=True)._seconds < run.build(samples=False)._seconds == 1.0


def test_an_update_that_takes_far_too_long_is_written_into_the_directory_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danling.supervision.hangs._GRACE_SECONDS", 0.05)
    run = Watched(tmp_path, comm={"hang_warning_seconds": 0.05})
    (hangs,) = run.watch._checks
    for run.state.train.global_step in (1, 2):
        hangs.check()
    end = time.monotonic() + patience(30)
    with caplog.at_level("WARNING", "danling"):
        while not caplog.records:
            assert time.monotonic() < end
            time.sleep(0.005)
            hangs.check()
    stacks = (tmp_path / "hangs" / "step-000000000002-rank-00000.txt").read_text()
    assert "hangs.check()" in stacks and "Rank 0" in caplog.text
