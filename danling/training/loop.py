"""The loops of a training: what is trained, evaluated and saved, and in which order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from danling.reporting import Reporter

from .boundaries import Boundaries, Boundary
from .evaluation import checked_figures
from .keys import RandomKeys
from .results import RunResults
from .safeguard import keeping_trained
from .session import DataEnded, EvaluationStopped, TrainingAbandoned, TrainingSession
from .update import UpdateOutcome

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

EvaluationVerb = Literal["evaluate_epoch", "evaluate_steps"]


def is_used_up(run: TorchRunner) -> bool:
    """Whether a run is at the end of its budget."""
    counters = run.state.train
    if run.is_step_mode:
        return counters.global_step >= (run.steps or 0)
    return counters.epoch >= (run.epochs or 0)


class TrainingLoop:
    """Trains epoch by epoch or update by update, from where the run stands to the end of its budget."""

    boundaries: Boundaries

    @staticmethod
    def parts() -> dict[Callable[..., object], str]:
        """Return what a rank does within functions of this class, for who looks at its stack."""
        return {TrainingLoop._evaluate: "evaluating", TrainingLoop._save_if_due: "checkpointing"}

    def __init__(
        self,
        run: TorchRunner,
        *,
        keys: RandomKeys,
        updates: Callable[[str], Iterator[UpdateOutcome]],
        pass_is_over: Callable[[str], bool],
        session: TrainingSession,
        results: RunResults,
        reporter: Reporter,
        save_if_failing: Callable[[], Callable[[], bool]],
        trained_metrics: Callable[[], dict[str, float]],
        first_update: Callable[[], None],
        log_update: Callable[[UpdateOutcome], None],
    ) -> None:
        self.has_jumped = False
        self.data_ended = False
        self._last_split: str | None = None
        self._run = run
        self._keys = keys
        self._updates = updates
        self._pass_is_over = pass_is_over
        self._save_if_failing = save_if_failing
        self._trained_metrics = trained_metrics
        self._first_update = first_update
        self._log_update = log_update
        self._session = session
        self._results = results
        self._reporter = reporter

    def is_done(self) -> bool:
        """Whether there is nothing left to train or to evaluate."""
        is_open = self._run.is_step_mode and self._results.open
        return (is_used_up(self._run) and not is_open) or self._results.facts.patience_exhausted()

    def say_done(self) -> None:
        """Log on the main process that nothing is left to train, and what makes the run go on."""
        run, counters = self._run, self._run.state.train
        if not self._reporter.is_main:
            return
        if not is_used_up(run):
            logger.warning("Nothing is left to train: the patience of the run is used up. Raise patience to go on.")
            return
        unit, done = ("steps", counters.global_step) if run.is_step_mode else ("epochs", counters.epoch)
        logger.warning(
            "Nothing is left to train: the run has completed %d of %d %s. Raise %s to go on.",
            done,
            run.steps if run.is_step_mode else run.epochs,
            unit,
            unit,
        )

    # By epochs

    def train_epochs(self, splits: Sequence[str], evaluated: Sequence[str]) -> None:
        """Train epoch by epoch."""
        run, counters, self.data_ended = self._run, self._run.state.train, False
        try:
            while counters.epoch < (run.epochs or 0) and not self._session.stop_reason:
                if self._train_splits(splits):
                    self._evaluate(evaluated, "evaluate_epoch")
                    self._finish_epoch(splits, "epoch")
                    self._save_if_due(counters.epoch, final=counters.epoch == run.epochs)
        except DataEnded:
            # What was trained was evaluated at the end of its epoch.
            self._note_end_of_data(f"epoch {counters.epoch} of {run.epochs}")

    def _train_splits(self, splits: Sequence[str]) -> bool:
        """Train what is left of the pass over each split; `False` where it was left half-way."""
        self.has_jumped = False
        for split in splits:
            if not self._is_trained(split):
                self._begin_pass(split)
                self._keep(split, self._run.train_epoch(split))
            if self._is_interrupted():
                return False
        return True

    def _finish_epoch(self, splits: Sequence[str], boundary: Boundary) -> None:
        for split in splits:
            self._run.source(split).finish_pass()
        counters = self._run.state.train
        counters.epoch += 1
        self._results.close(boundary, step=counters.global_step)

    def train_epoch(self, split: str) -> dict[str, float]:
        """Train what is left of one pass over one split, and return its metrics; none where it was left half-way."""
        for outcome in self._updates(split):
            self._after_update(outcome)
            if self._session.stop_reason:
                return {}
        if self.has_jumped:
            return {}
        metrics = self._results.open[split] = self._trained_metrics()
        return metrics

    def train_epoch_alone(self, split: str, train_epoch: Callable[[], object], splits: Sequence[str]) -> object:
        """Train a pass that no loop has asked for; the epoch is counted where every split to train on has had its pass."""
        self.has_jumped = False
        self._begin_pass(split)
        metrics = train_epoch()
        self._keep(split, metrics)
        if not self._is_interrupted():
            if split not in splits:
                self._run.source(split).finish_pass()
                del self._results.open[split]
            elif all(other in self._results.open for other in splits):
                self._finish_epoch(splits, "alone")
        return metrics

    def _keep(self, split: str, metrics: object) -> None:
        if self._is_interrupted():
            return  # half-way through the pass
        if metrics is None:
            self._results.open.setdefault(split, {})
        else:
            self._results.open[split] = checked_figures("train_epoch", split, metrics)

    def _is_interrupted(self) -> bool:
        """Whether the loops must leave the pass: the run is to stop, or its state was replaced by one of another pass."""
        return self._session.stop_reason is not None or self.has_jumped

    # By updates

    def train_steps(self, splits: Sequence[str], evaluated: Sequence[str]) -> None:
        """Train update by update, pass after pass over the data. If stopped during an evaluation, resume starts with that evaluation."""
        if self._results.open:
            self._validate(evaluated, final=self._run.state.train.global_step == self._run.steps)
        run, counters, self.data_ended = self._run, self._run.state.train, False
        try:
            while counters.global_step < (run.steps or 0) and not self._session.stop_reason:
                if self._train_pass(splits, evaluated):
                    self._count_pass()
        except DataEnded:
            step = counters.global_step
            self._note_end_of_data(f"update {step} of {run.steps}")
            if step and step not in run.results:
                # The run is at its end: what it trained last is evaluated and saved as after the last update of the budget.
                self._results.open[self._last_split or splits[-1]] = self._trained_metrics()
                self._validate(evaluated, final=True)

    def _note_end_of_data(self, where: str) -> None:
        self.data_ended = True
        if self._reporter.is_main:
            logger.warning("The stream of samples ended at %s: the run ends there.", where)

    def _train_pass(self, splits: Sequence[str], evaluated: Sequence[str]) -> bool:
        """Train what is left of one pass over all splits, evaluating on the way; `False` where it was left half-way."""
        self.has_jumped = False
        for split in splits:
            if self._is_trained(split):
                continue
            self._begin_pass(split)
            for outcome in self._updates(split):
                is_over = self._after_step(splits, split, outcome, evaluated)
                if is_over or self._session.stop_reason:
                    return False
            if self.has_jumped:
                return False
            self._run.source(split).finish_pass()
        return True

    def _count_pass(self) -> None:
        self._run.state.train.epoch += 1
        self._results.schedule.end_pass()

    def _after_step(self, splits: Sequence[str], split: str, outcome: UpdateOutcome, evaluated: Sequence[str]) -> bool:
        """Do what is due at an update boundary of step mode; return whether the budget, which may change at any time, is used up."""
        self._last_split = split
        self._after_update(outcome)
        step = self._run.state.train.global_step
        final = step == self._run.steps
        if outcome.committed:
            if final and self._pass_is_over(split):
                # Before what is evaluated and saved last: no loop comes to the end of this pass any more.
                self._run.source(split).finish_pass()
                if split == splits[-1]:
                    self._count_pass()
            if self.boundaries.evaluation_due(step, final=final):
                self._results.open[split] = self._trained_metrics()
                self._validate(evaluated, final=final)
            elif self.boundaries.checkpoint_due(step) or step in self._run.results:
                self._save_if_due(step, final=False)
        return final

    def _validate(self, evaluated: Sequence[str], *, final: bool) -> None:
        """Evaluate in step mode, and save what follows from it; `final` where the run ends here."""
        step = self._run.state.train.global_step
        self._evaluate(evaluated, "evaluate_steps")
        self._results.close("validation", step=step)
        self._save_if_due(step, final=final)

    # Both

    def _begin_pass(self, split: str) -> None:
        self._keys.begin_pass(split, self._run.source(split).epoch)

    def jumps_out_of(self, split: str) -> bool:
        """Note whether a state that was taken over stands behind the pass over a split."""
        self.has_jumped = self._is_trained(split)
        return self.has_jumped

    def _is_trained(self, split: str) -> bool:
        """Whether the pass that the state stands in is over for one of the splits."""
        run = self._run
        if is_used_up(run):
            return True
        if run.is_step_mode:
            return run.source(split).epoch > run.state.train.epoch
        return split in self._results.open

    def _evaluate(self, splits: Sequence[str], verb: EvaluationVerb) -> None:
        """Evaluate what was trained up to here; whatever goes wrong, it is saved, and a run that goes on begins with this evaluation."""
        if not splits:
            return
        step = self._run.state.train.global_step
        with keeping_trained(self._save_if_failing(), step=step, passing=(EvaluationStopped, TrainingAbandoned)):
            for split in splits:
                with self._session.evaluating(split):
                    metrics = getattr(self._run, verb)(split)
                self._results.open[split] = checked_figures(verb, split, metrics)
            self._results.check()

    def _after_update(self, outcome: UpdateOutcome) -> None:
        """What happens at every update boundary, besides evaluation and periodic checkpoints."""
        session, counters = self._session, self._run.state.train
        step = counters.global_step
        if self._reporter.telemetry is not None:
            self._reporter.telemetry.stepped(committed=outcome.committed)
        if outcome.committed:
            if not session.updated_once:
                # Compilation and the first data make the first update slow; the limit that catches a hang begins after it.
                session.updated_once = True
                self._first_update()
            if self.boundaries.log_due(step):
                self._log_update(outcome)
        # A skipped update is work that was done as well, on all ranks.
        session.updated(step, counters.epoch)
        self._reporter.stepped(step)
        if session.save_requested and not (outcome.committed and self._evaluates_at(step)):
            self._run.save_checkpoint()
            session.save_requested = False

    def _evaluates_at(self, step: int) -> bool:
        """Whether an evaluation is due first, which a checkpoint follows, so that a resumed run does not leave it out."""
        return self._run.is_step_mode and self.boundaries.evaluation_due(step, final=step == self._run.steps)

    def _save_if_due(self, index: int, *, final: bool) -> None:
        self.boundaries.save_if_due(index, final=final, requested=self._session.save_requested)
        self._session.save_requested = False
