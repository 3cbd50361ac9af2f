"""Has a user's program make a few updates, be resumed, and evaluate: whether it works from one end to the other.

The program is started twice in a scratch directory. The first start ends after some updates, with a save. The second one resumes from it,
makes as many updates, evaluates a few batches, saves, and ends. Both leave the program where `train()` would return.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from danling.prove.program import announce, run_program, scratch_settings
from danling.training.extension import Extension
from danling.utils.observers import Observer
from danling.workspace.runs import Run

from .rerun import checkpoints_of

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner
    from danling.training import TrainingSession, UpdateOutcome


class QuickRun(Observer, Extension):
    """Ends a training of `audit.quick`: a first start after so many updates, a resumed one after as many more and an evaluation."""

    critical = True

    def __init__(self, runner: TorchRunner, session: TrainingSession, updates: int) -> None:
        self._runner = runner
        self._session = session
        self._updates = updates
        self._begun_at = 0
        """Updates of the run when the training began; 0 in a first start."""

    @property
    def _made(self) -> int:
        return self._runner.state.train.global_step - self._begun_at

    def training_started(self) -> None:
        self._begun_at = self._runner.state.train.global_step

    def update_ended(self, outcome: UpdateOutcome) -> None:
        if self._begun_at == 0 and self._made >= self._updates:
            self._session.stop_reason = "stop"

    def ends_pass(self) -> bool:
        return self._begun_at > 0 and not self._runner.is_step_mode and self._made >= self._updates

    def evaluation_saved(self) -> None:
        if self._begun_at > 0 and self._made > 0:
            self._session.stop_reason = "stop"

    def training_finished(self) -> None:
        # What the program does behind its training, such as an export, is not meant for such weights.
        raise SystemExit(0)


class QuickRunFailed(ValueError):
    """The program did not train, save, resume and evaluate."""


def try_quickly(command: Sequence[str], directory: Path, *, updates: int, timeout: float) -> str:
    """Start a program twice, each within `timeout` seconds, and return a sentence on what it did."""
    run, log = directory / "run", directory / "output.log"
    settings = {
        **scratch_settings(run),
        "audit.quick": updates,
        # Not at the end of the first start, which only saves.
        "evaluate_interval": 2 * updates,
    }
    steps = []
    for number, what in enumerate(("trains and saves", "resumes, trains, evaluates and saves"), 1):
        announce(f"{number} of 2: the program {what}, with {updates} updates, within {timeout:g} s")
        ended = run_program(
            command, {**settings, "auto_resume": number == 2}, log=log, timeout=timeout
        )
        has_saved = any((run / "checkpoints").glob("latest*"))
        if ended.code != 0 or not has_saved:
            how = f"no end in {timeout:g} s" if ended.code is None else f"exit code {ended.code}"
            saved = "" if has_saved else ", and no checkpoint"
            raise QuickRunFailed(
                f"Expected a program that {what}. Received: {how}{saved}; the end of what it printed:\n{ended.tail.strip()}\n"
                "Fix that first."
            )
        steps.append(checkpoints_of(run)[-1].step)
        # The resumed start would find nothing left to train.
        if number == 1 and steps[0] < updates:
            raise QuickRunFailed(
                f"Expected a program that makes at least {updates} updates. Received: {steps[0]} until its end. Write --quick {steps[0]}."
            )
    made = f"{steps[0]} updates, and {steps[1] - steps[0]} after its resume"
    results = Run(run, "quick").results
    if any(split != "train" for result in results.values() for split in result):
        return f"this program trains, evaluates, saves and resumes ({made})"
    return f"this program trains, saves and resumes ({made}); it evaluates no split"
