"""What stands behind the short methods of a torch runner: its parts, and what each of them is constructed of.

A part is handed values, callables, or the runner itself as the small protocol that the part asks for. A hook is looked up on the runner at
every call, since a user may override it, and a setting may change while a run trains: nothing of these is bound here.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from danling.checkpoints import FileCheckpointManager
from danling.config.checks import endless_streams, idle_settings
from danling.metrics import Meters, MetricSet, TrainMetrics
from danling.optim.building import scheduler_interval
from danling.reporting.run_report import RunReport
from danling.training import PassAgreement, criterion_setting
from danling.training.canonical import CanonicalSum
from danling.training.component_checks import misnamed_overrides
from danling.training.evaluation import Evaluator
from danling.training.loop import TrainingLoop
from danling.training.readiness import Readiness
from danling.training.recompute import MemoryRetry, Recompute, RunWindow
from danling.training.results import RunResults
from danling.training.update import UpdateStep
from danling.training.weighing import BatchLoss

from .alone import LoneVerbs
from .extensions import is_asked, load
from .saved import SavedParts
from .wrapping import ModelWrapping

if TYPE_CHECKING:
    from danling.audit.attach import Audits

    from .torch_runner import TorchRunner

logger = logging.getLogger("danling")


class TorchParts:
    """The parts of a torch runner, each made when it is first asked for, after the user's `__init__`."""

    metrics: MetricSet
    train_metrics: TrainMetrics | None = None

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self.wrapping = ModelWrapping(runner)
        self.saved = SavedParts(runner, self)

    # Construction

    @cached_property
    def readiness(self) -> Readiness:
        """What looks at the run before it trains."""
        runner = self.runner
        return Readiness(
            runner,
            world=runner.world,
            preparation=runner.preparation,
            overrides=runner._overrides,
            interval=self.scheduler_interval,
            monitors=lambda: "monitor" in runner.config.get("scheduler", {}),
            bound=runner.distributed or runner.stack != "ddp",
            speaks=runner.is_main_process,
        )

    @cached_property
    def audits(self) -> Audits | None:
        """What checks updates while they are made; `None` where no setting of `audit` asks for it."""
        if not is_asked("audit", self.runner.config):
            return None
        audits: Audits = load("audit").Audits(self.runner)
        return audits

    def idle_settings(self) -> list[str]:
        """Return a sentence for every setting, and every override, that has no effect in this run. May be called on one rank."""
        runner = self.runner
        plan, splits, trained = runner._data.plan, runner._data.splits, runner.train_splits
        built = [runner.sources[split] for split in runner.datasets if split in runner.sources]
        return [
            *idle_settings(
                runner.config,
                evaluates=bool(runner.evaluate_splits),
                step_mode=runner.is_step_mode,
                positioned=all(source.kind in ("position", "sampled") for source in built),
                writes_files=isinstance(runner.checkpoint_manager, FileCheckpointManager),
                divides_updates=not trained or any(plan.division(split) or splits.replaced(split) for split in trained),
            ),
            *splits.idle_settings(),
            *runner.preparation.unused_settings(),
            *([] if runner.is_step_mode else endless_streams(trained, splits.lengths or {})),
            *misnamed_overrides(type(runner), vars(runner), self.readiness.unset()),
        ]

    def scheduler_interval(self) -> str:
        """Return when the scheduler advances: `"step"`, `"epoch"` or `"validation"`."""
        config = self.runner.config
        return scheduler_interval(config.scheduler if "scheduler" in config else {}, self.runner.scheduler)

    @property
    def sums_loss(self) -> bool:
        """Whether the criterion sums instead of averaging, so that its gradient is not divided."""
        return criterion_setting(self.runner.criterion, "reduction") == "sum"

    # Batches

    @cached_property
    def loss(self) -> BatchLoss:
        """What weighs the batches, and knows which of them have a loss."""
        return BatchLoss(self.runner)

    @cached_property
    def agreement(self) -> PassAgreement:
        """How the ranks end a pass together."""
        return self.runner.build_agreement()

    @cached_property
    def run_window(self) -> RunWindow:
        """What runs the micro-batches of an update."""
        run_window = self.update.run_window
        if self.runner._data.plan.finds_micro_batch_size:
            run_window = MemoryRetry(self.runner, run_window, self.recompute).run_window
        return run_window if self.audits is None else self.audits.around(run_window)

    @cached_property
    def canonical(self) -> CanonicalSum | None:
        """What adds in one order; `None` unless `gradient_sum: canonical`."""
        return CanonicalSum(self.runner) if self.runner.config.gradient_sum == "canonical" else None

    @cached_property
    def recompute(self) -> Recompute:
        """What takes the micro-batches of an update back, so that they can be run again."""
        return Recompute(self.runner)

    # One update

    @cached_property
    def losses(self) -> Meters:
        """Loss of the open epoch, or since the last evaluation in step mode; there from the beginning, unlike what makes updates."""
        return Meters()

    @cached_property
    def update(self) -> UpdateStep:
        """What makes updates."""
        update = UpdateStep(self.runner)
        if self.runner.fault_tolerance is not None or self.runner.config.audit.replay_interval is not None:
            update.recompute = self.recompute
        if self.audits is not None:
            self.audits.see_updates(update)
        return update

    # Evaluation

    @cached_property
    def evaluator(self) -> Evaluator:
        """What evaluates and predicts whole splits."""
        return Evaluator(self.runner)

    # Loops

    @cached_property
    def loop(self) -> TrainingLoop:
        """The loops of the run."""
        return TrainingLoop(self.runner)

    @cached_property
    def results(self) -> RunResults:
        """What collects and records metrics."""
        return RunResults(self.runner)

    @cached_property
    def report(self) -> RunReport:
        """What tells the reporter of the trainings of the run."""
        return RunReport(self.runner)

    @cached_property
    def alone(self) -> LoneVerbs:
        """What runs verbs that no loop has called."""
        return LoneVerbs(self.runner, self)
