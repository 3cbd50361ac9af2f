"""What is due between two updates: the evaluations of a training, the results of what it has trained, and the saves that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from danling.distributed import MembershipChanged, set_collective_timeout
from danling.metrics import TrainMetrics
from danling.reporting import Reporter

from .extension import Extension
from .keys import RandomKeys
from .outcome import UpdateOutcome
from .results import RunResults, checked_figures
from .session import EvaluationStopped, TrainingAbandoned, TrainingSession
from .update import UpdateStep

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


class DueWork:
    """Evaluates and saves between two updates, where it is time to. All methods are called on all ranks."""

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        keys: RandomKeys,
        *,
        reporter: Reporter,
        train_metrics: TrainMetrics | None,
        update: UpdateStep,
        results: RunResults,
        extensions: list[Extension],
    ) -> None:
        self._runner = runner
        self._session = session
        self._keys = keys
        self._reporter = reporter
        self._train_metrics = train_metrics
        self._update = update
        self._results = results
        self._extensions = extensions
        self._evaluate_every = 1
        self._checkpoint_every = 1

    def read_intervals(self) -> None:
        """Read the intervals, which may follow from the budget."""
        runner = self._runner
        self._update.log_every = runner.log_interval
        self._checkpoint_every = runner.checkpoint_interval
        self._evaluate_every = runner.config.evaluate_interval or self._checkpoint_every

    def evaluation_is_due(self, step: int) -> bool:
        return self._runner.is_step_mode and (
            step == self._runner.steps or step % self._evaluate_every == 0
        )

    def validate(self, evaluated: Sequence[str], *, final: bool) -> None:
        """Evaluate in step mode, and save what follows from it; `final` where the run ends here."""
        self.evaluate(evaluated, "evaluate_steps")
        self._results.close("validation")
        self.save_if_due(self._runner.state.train.global_step, final=final)
        self.note_evaluation_saved()

    def note_evaluation_saved(self) -> None:
        """Tell the extensions that nothing of an evaluation is left to be done."""
        for extension in self._extensions:
            extension.evaluation_saved()

    def reach_boundary(
        self, split: str, evaluated: Sequence[str], *, final: bool, again: bool = False
    ) -> None:
        """Evaluate and save after an update of step mode where it is time to.

        Args:
            split: The split that was trained on.
            evaluated: Splits to evaluate.
            final: Whether the budget ends here.
            again: Whether the ranks have changed meanwhile.
        """
        runner, step = self._runner, self._runner.state.train.global_step
        # As `evaluation_is_due` has it, without its calls in every update.
        is_due = final or step % self._evaluate_every == 0
        # The ranks may have changed within the evaluation, which is made again, or within the save that follows it.
        is_made = again and self._results.scored_at == step
        if is_due and not is_made:
            # Open until they are recorded: a run that is saved within the evaluation has them.
            self._results.open[split] = self.trained_metrics()
            self.validate(evaluated, final=final)
        elif is_due or step % self._checkpoint_every == 0 or step in runner.results:
            # A program may have recorded results of a step that is not due, which may be the best.
            self.save_if_due(step, final=final)

    def trained_metrics(self) -> dict[str, float]:
        """Return the metrics of the training batches since the last call, over all ranks and all that train together."""
        runner, losses, trained = self._runner, self._update.losses, self._train_metrics
        # The loss of an update that was not finite must not become a result.
        self._update.raise_pending_error()
        metrics = losses.averages()
        # Called also where this rank has summed nothing: another rank may have, and the sum is a collective.
        totals = runner.meters.totals(runner.placement.metrics)
        for extension in self._extensions:
            totals = extension.sum_totals(totals)
        metrics.update({name: total / weight for name, (total, weight) in totals.items() if weight})
        if trained is not None:
            metrics.update(trained.compute_objects(runner.placement.metrics))
            trained.reset()
        losses.reset()
        runner.meters.reset()
        return metrics

    def evaluate(
        self, splits: Sequence[str], verb: Literal["evaluate_epoch", "evaluate_steps"]
    ) -> None:
        """Evaluate what was trained up to here; if the evaluation fails, it is saved, and a resumed run begins with this evaluation."""
        if not splits:
            return
        results, keys = self._results, self._keys
        # What is logged from here on belongs to the save that follows the evaluation.
        self._reporter.trackers.hold_mark()
        # As in a run that is resumed here.
        keys.between_updates()
        with self._runner.saver.keeping_trained(
            passing=(EvaluationStopped, TrainingAbandoned, MembershipChanged)
        ):
            for split in splits:
                with self._session.evaluating(split):
                    metrics = getattr(self._runner, verb)(split)
                results.open[split] = checked_figures(verb, split, metrics)
            results.check()
        keys.between_updates()

    def after_update(self, outcome: UpdateOutcome) -> None:
        """Do the work of every update boundary other than evaluation and periodic checkpoints."""
        runner, session, step = self._runner, self._session, self._runner.state.train.global_step
        if outcome.committed and not session.updated_once:
            session.updated_once = True
            limit = runner.config.comm.train_timeout_seconds
            if limit is not None and runner.distributed:
                # Compilation and the first data make the first update slow: the limit that catches a hang begins after it.
                runner.world.barrier()
                set_collective_timeout(limit, runner.placement.groups())
        # Where an evaluation is due, a checkpoint follows it, so that a resumed run does not leave it out.
        if session.save_requested and not (outcome.committed and self.evaluation_is_due(step)):
            runner.save_checkpoint()
            session.save_requested = False

    def save_if_due(self, index: int, *, final: bool) -> None:
        """Save where it is time to, at the end, where it was asked for, and after the best evaluation."""
        runner, requested = self._runner, self._session.save_requested
        periodic = index % self._checkpoint_every == 0
        # Only a periodic save gets a name of its own in the history; others replace the latest one.
        if final or periodic:
            runner.save_checkpoint(history=periodic)
        elif requested or self._is_best(index):
            runner.save_checkpoint()
        self._session.save_requested = False

    def _is_best(self, index: int) -> bool:
        """Whether the evaluation at an epoch or a step has the best score so far."""
        runner = self._runner
        return index in runner.results and runner.is_best and runner.standing.latest_index == index
