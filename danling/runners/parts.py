"""The collaborators of a runner, in the order in which they are made: what a runner consists of besides the methods that users override."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from danling.config.lock import SettingsLock
from danling.data.run_data import RunData
from danling.distributed import CollectiveCalls, collective_timeout
from danling.metrics import Meters, MetricSet, TrainMetrics
from danling.metrics.scores import infer_mode, metric_of
from danling.optim.registry import scheduler_interval
from danling.reporting import Reporter
from danling.training import PassAgreement, TrainingSession
from danling.training.attributes import KeptAttributes
from danling.training.batches import BatchLoss, criterion_setting
from danling.training.checks import ComponentChecks, FiniteWeights
from danling.training.evaluation import Evaluator, RunResults
from danling.training.keys import RandomKeys
from danling.training.loop import TrainingLoop
from danling.training.model_states import FrozenWeights
from danling.training.observer_states import ObserverStates
from danling.training.phases import Phases
from danling.training.recompute import Recompute
from danling.training.reduction import CanonicalSum
from danling.training.update import RunWindow, UpdateStep
from danling.workspace.workspace import RunPlace

from .extensions import is_asked, load

if TYPE_CHECKING:
    from danling.audit.attach import Audits
    from danling.remote.attach import RemoteStores

    from .base_runner import BaseRunner
    from .torch_runner import TorchRunner


class Closers(ExitStack):
    """Closes what was opened, last opened first, once; if one of them fails, the others are closed all the same."""

    closed = False

    def close(self) -> None:
        """Close everything; a second call does nothing."""
        if not self.closed:
            self.closed = True
            super().close()


class Parts:
    """The collaborators of every runner, in the order in which they are made.

    `open` and `join` are called in `BaseRunner.__init__`, before that of the user goes on: `join` when the process group is there.
    """

    calls: CollectiveCalls | None = None
    """Names the method that waits for other ranks; `None` until the process group is there."""
    run_place: RunPlace
    settings_lock: SettingsLock

    def __init__(self, runner: BaseRunner) -> None:
        self.owner = runner
        self.closers = Closers()
        self.session = TrainingSession()

    def open(self, *, own_accum_steps: bool) -> None:
        """Make what needs the configuration and the device."""
        owner, audit = self.owner, self.owner.config.audit
        divided = load("audit").divide_for_check(owner) if audit.gradients.dir is not None else None
        self.data = RunData(owner, own_accum_steps=own_accum_steps, divided=divided)
        self.keys = RandomKeys(owner)
        self.attributes = KeptAttributes(owner)
        self.observer_states = ObserverStates(owner)
        self.reporter = Reporter(owner)
        self.session.observers.extend([self.reporter.telemetry, self.reporter])

    def watch_calls(self) -> None:
        """Note from now on which method each rank has called. The process group is there."""
        owner = self.owner
        self.calls = CollectiveCalls.of(
            owner.world.rank, owner.world.size, limit=lambda: collective_timeout(owner.device)
        )

    def find_place(self) -> RunPlace:
        """Return the directory of the run, which is chosen here. Called on all ranks."""
        self.run_place = RunPlace(self.owner)
        self.closers.callback(self.run_place.release)
        # Trackers that were added but never opened are closed too, before the right to write into the run directory is given up.
        self.closers.callback(self.reporter.trackers.close)
        return self.run_place

    @property
    def is_copied(self) -> bool:
        """Whether the run is copied to an object store."""
        return is_asked("remote", self.owner.config)

    @cached_property
    def remote(self) -> RemoteStores:
        """The object stores of the run, and those of URLs; the extension is loaded here."""
        stores: RemoteStores = load("remote").RemoteStores(self.owner)
        return stores


class TorchParts(Parts):
    """The parts of a torch runner; what the user's `__init__` decides is made when it is first asked for."""

    metrics: MetricSet
    train_metrics: TrainMetrics | None = None
    built_optimizer: Any = None
    """What `build_optimizer` returned."""
    built_scheduler: Any = None
    """What `build_scheduler` returned."""

    phases: Phases | None = None
    """The updates of several optimizers by name; `None` for a single optimizer."""

    def __init__(self, runner: TorchRunner) -> None:
        super().__init__(runner)
        self.runner = runner

    def open(self, *, own_accum_steps: bool) -> None:
        super().open(own_accum_steps=own_accum_steps)
        runner = self.runner
        self.checks = ComponentChecks(runner)
        self.frozen = FrozenWeights(runner)
        self.finite = FiniteWeights(runner)
        self.loss = BatchLoss(runner)
        self.recompute = Recompute(runner)
        self.losses = Meters()
        """Loss of the open epoch, or since the last evaluation in step mode."""
        self.loop = TrainingLoop(runner)
        self.results = RunResults(runner)

    @cached_property
    def audits(self) -> Audits | None:
        """What checks updates while they are made; `None` where no setting of `audit` asks for it."""
        if not is_asked("audit", self.runner.config):
            return None
        audits: Audits = load("audit").Audits(self.runner)
        return audits

    def scheduler_interval(self) -> str:
        """Return when the scheduler advances: `"step"`, `"epoch"` or `"validation"`."""
        config = self.runner.config
        return scheduler_interval(config.scheduler if "scheduler" in config else {}, self.runner.scheduler)

    @property
    def score_path(self) -> str:
        """Dotted path of the score, such as `val.loss`."""
        return f"{self.runner.score_split}.{metric_of(self.runner.config.score_name, self.runner.score_split)}"

    def mode_of_schedule(self) -> str:
        """Return which value of the metric that a schedule follows is the better one: that of the score, or by the name of another one."""
        config = self.runner.config
        monitor = (config.get("scheduler", None) or {}).get("monitor", None)
        if monitor and monitor != self.score_path:
            return infer_mode(str(monitor).partition(".")[2])
        return config.score_mode.lower() if config.score_mode else infer_mode(self.score_path.partition(".")[2])

    @property
    def sums_loss(self) -> bool:
        """Whether the criterion sums instead of averaging, so that its gradient is not divided."""
        return criterion_setting(self.runner.criterion, "reduction") == "sum"

    @property
    def may_divide_by_zero(self) -> bool:
        """Whether the mean over no target at all may have a gradient of NaN: not that of torch's criterions without class weights."""
        runner = self.runner
        own = self.loss.own_loss or runner._overrides("train_step")
        plain = runner.criterion is None or type(runner.criterion) in (nn.CrossEntropyLoss, nn.NLLLoss)
        return own or not plain or criterion_setting(runner.criterion, "weight") is not None

    @cached_property
    def agreement(self) -> PassAgreement:
        """How the ranks end a pass together."""
        return self.runner.build_agreement()

    @cached_property
    def evaluator(self) -> Evaluator:
        """What evaluates and predicts whole splits."""
        return Evaluator(self.runner)

    @cached_property
    def canonical(self) -> CanonicalSum | None:
        """What adds in one order; `None` unless `gradient_sum: canonical`."""
        return CanonicalSum(self.runner) if self.runner.config.gradient_sum == "canonical" else None

    @cached_property
    def update(self) -> UpdateStep:
        """What makes updates."""
        update = UpdateStep(self.runner)
        if self.runner.fault_tolerance is not None or self.runner.config.audit.replay_interval is not None:
            update.recompute = self.recompute
        if self.audits is not None:
            self.audits.see_updates(update)
        return update

    @cached_property
    def run_window(self) -> RunWindow:
        """What runs the micro-batches of an update."""
        fits = not self.data.finds_micro_batch_size
        run_window = self.update.run_window if fits else self.update.run_window_that_fits
        return run_window if self.audits is None else self.audits.around(run_window)
