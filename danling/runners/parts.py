"""The collaborators of a runner, in the order in which they are made. Users override none of them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from danling.config.lock import SettingsLock
from danling.data.run_data import RunData
from danling.distributed import CollectiveCalls, collective_timeout
from danling.metrics import Meters, MetricSet, TrainMetrics
from danling.reporting import Reporter
from danling.reporting.record import RunRecorder
from danling.training import TrainingSession
from danling.training.asked_options import AskedOptions
from danling.training.attributes import KeptAttributes
from danling.training.batch_weights import BatchLoss
from danling.training.canonical_sum import CanonicalSum
from danling.training.component_checks import ComponentChecks
from danling.training.evaluation import Evaluator
from danling.training.extension import Extension
from danling.training.first_gradients import FirstGradients
from danling.training.keys import RandomKeys
from danling.training.live_state import LiveState
from danling.training.loop import TrainingLoop
from danling.training.metric_checks import GivenMetrics, MetricsInTraining
from danling.training.model_states import FrozenWeights
from danling.training.observer_states import ObserverStates
from danling.training.pass_settings import PassSettings
from danling.training.phases import Phases, phases_of
from danling.training.recompute import Recompute, SkippedUpdates
from danling.training.results import RunResults
from danling.training.run_state import RunState
from danling.training.save_checks import ExtraStates, FiniteWeights
from danling.training.saving import RunSaver
from danling.training.schedule import Schedule
from danling.training.unsaved_changes import UnsavedChanges
from danling.training.update import RunWindow, UpdateStep
from danling.utils.hooks import is_overridden
from danling.utils.observers import Observer
from danling.workspace.workspace import RunLocation

from .extensions import is_asked, load

if TYPE_CHECKING:
    from danling.audit.attach import Audits
    from danling.elastic.attach import ElasticRanks, ElasticTraining
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

    `BaseRunner.__init__` calls `open`, and `join` when the process group is there; then the `__init__` of the user continues. `finish` is
    called at the end of construction.
    """

    elastic: ElasticRanks | None = None
    """This process among ranks that may end at any time; `None` unless `elastic.enabled`."""
    settings_lock: SettingsLock
    """Which settings may still change."""
    calls: CollectiveCalls | None = None
    """Compares which method each rank calls; `None` until the process group is there, and with `elastic.enabled`."""

    def __init__(self, runner: BaseRunner) -> None:
        self.owner = runner
        """The runner. `TorchParts` has it as `runner` too, typed as a `TorchRunner`."""
        self.closers = Closers()
        self.session = TrainingSession()
        self.extensions: list[Extension] = []
        """Extensions that take part in a training."""

    def open(self) -> None:
        """Make what needs the configuration and the device."""
        owner, session, closers = self.owner, self.session, self.closers
        divided = None
        if owner.config.audit.gradients.dir is not None:
            # `danling check-layout` compares layouts on the same samples: it divides the data in the same way on all of them.
            divided = load("audit").divide_for_check(owner, closers)
        own_accum_steps = is_overridden(owner, "accum_steps")
        self.data = RunData(owner, session, own_accum_steps=own_accum_steps, divided=divided)
        self.keys = RandomKeys(owner, session, self.extensions)
        if is_overridden(owner, "step"):
            # The last micro-batch has left the streams of each rank at another place.
            session.seed_step = partial(self.keys.begin_update, "step")
        self.attributes = KeptAttributes(owner)
        self.observer_states = ObserverStates(owner, session.observers)
        self.reporter = Reporter(owner, session, self.data, closers)
        self.stores = self._asked_stores()
        self.run_state = RunState(owner)
        self.saver = RunSaver(owner, session, self.extensions, self.stores)
        # A program that saves goes on from what it has loaded, as one that trains does.
        self.saver.before.append(self.reporter.trackers.begin_training)
        session.observers.extend([self.reporter.telemetry, self.reporter])

    @cached_property
    def remote(self) -> RemoteStores:
        """The object stores of URLs and of the run, which load the extension. `stores` is the same object if the run is copied to one."""
        stores: RemoteStores = load("remote").RemoteStores(self.owner, self.reporter)
        return stores

    def note_hook(self) -> None:
        """Note that the program has set a hook on the runner that loops may leave out. Of this runner, no loop does."""

    def join(self) -> None:
        """Make what needs the other ranks. Called on all ranks."""
        owner = self.owner
        self.reporter.begin_log()
        # An elastic rank may end at any time, which the comparison would take for a call of another method.
        if self.elastic is None:
            self.calls = CollectiveCalls.of(
                owner.world.rank, owner.world.size, limit=lambda: collective_timeout(owner.device)
            )
        joined = None if self.elastic is None else self.elastic.joined_run
        self.run_location = RunLocation(owner, self.stores, joined)
        self.follow_store()
        self.closers.callback(self.run_location.release)
        # Trackers that were added but never opened are closed too, before the right to write into the run directory is given up.
        self.closers.callback(self.reporter.trackers.close)

    def follow_store(self) -> None:
        """Read `checkpoint.remote.url` again, which the user's `__init__` may set or unset. No communication."""
        stores = self._asked_stores()
        self.stores = self.saver.stores = self.run_location.stores = stores
        if stores is not None:
            stores.follow(self.run_location)

    def _asked_stores(self) -> RemoteStores | None:
        return self.remote if is_asked("remote", self.owner.config) else None

    def finish(self) -> None:
        """Make what is needed from the restore on. Called on all ranks, at the end of construction."""
        self.closers.callback(self.data.close)
        self.closers.callback(self.session.end)


class TorchParts(Parts):
    """The collaborators that train, in the order in which they are made.

    `TorchRunner.prepare_components` calls `prepare` when the `__init__` of the user has set the components, and `complete` when these are
    prepared.
    """

    elastic_training: ElasticTraining | None = None
    """Lets the other ranks continue when some end; `None` unless `elastic.enabled`."""
    phases: Phases | None = None
    """The updates of several optimizers by name; `None` for a single optimizer."""

    def __init__(self, runner: TorchRunner) -> None:
        super().__init__(runner)
        self.runner = runner

    def open(self) -> None:
        super().open()
        runner = self.runner
        self.checks = ComponentChecks(runner, self.session, self.data)
        self.frozen = FrozenWeights(runner)
        self.finite = FiniteWeights(runner)
        self.loss = BatchLoss(runner, self.data)
        self.live_state = LiveState(runner, self.attributes, self.data, self.observer_states)
        self.pass_settings = PassSettings(runner)
        self.asked_options = AskedOptions(runner, self.attributes)
        self.unsaved = UnsavedChanges(runner, self.pass_settings)
        self.losses = Meters()
        """Loss of the open epoch, or since the last evaluation in step mode."""
        self.built_optimizer: Any = None
        """What `build_optimizer` returned."""

    def prepare(self) -> None:
        """Make what sums gradients and metrics. The user has set the components; they are neither on the device nor wrapped yet."""
        runner = self.runner
        self._wrap_metrics()
        self.recompute = Recompute(
            runner, self.attributes, self.observer_states, self.data, self.train_metrics
        )
        self.canonical: CanonicalSum | None = None
        if runner.config.gradient_sum == "canonical":
            self.canonical = CanonicalSum(runner, self.attributes, self.recompute)
        self.audits = self._audits()
        self.recorder = None if self.audits is None else self.audits.recorder
        if self.recorder is not None:
            self.recorder.prepare(runner.model, runner.criterion)

    def _wrap_metrics(self) -> None:
        """Make the metrics of evaluation and of training from those that the user has set."""
        runner, config = self.runner, self.runner.config
        is_exact = config.gradient_sum == "canonical"
        self.given_metrics = GivenMetrics(runner)
        self.metrics = MetricSet.wrap(
            runner.metrics, domain=runner.placement.metrics, device=runner.device, exact=is_exact
        )
        names = config.train_metrics
        self.train_metrics = TrainMetrics(self.metrics, names, runner.meters) if names else None

    def _audits(self) -> Audits | None:
        """Return what checks updates while they are made; `None` where no setting of `audit` asks for it."""
        if not is_asked("audit", self.runner.config):
            return None
        audits: Audits = load("audit").Audits(
            self.runner, self.session, self.recompute, self.closers, self.extensions
        )
        return audits

    def complete(self) -> None:
        """Make what trains and evaluates. Model, optimizer, schedule and loaders are ready for training."""
        runner, session = self.runner, self.session
        if self.given_metrics.have_changed():
            # A hook such as `build_dataloaders` has set others.
            self._wrap_metrics()
            self.recompute.train_metrics = self.train_metrics
        self.phases = phases_of(runner, session, self.data)
        self.schedule = Schedule(runner)
        self.agreement = runner.build_agreement()
        self.skipped = SkippedUpdates(runner, self.attributes, self.train_metrics)
        self.update = UpdateStep(
            runner,
            session,
            self.keys,
            self.data,
            self.loss,
            losses=self.losses,
            metrics=self.train_metrics,
            schedule=self.schedule,
            phases=self.phases,
            agreement=self.agreement,
            canonical=self.canonical,
            recompute=self.recompute,
            skipped=self.skipped,
        )
        self.closers.callback(self.update.finite.log_pending)
        self.evaluator = Evaluator(
            runner,
            session,
            self.keys,
            self.data,
            self.loss,
            self.metrics,
            self.given_metrics,
            self.update,
            self.recompute,
        )
        self.results = RunResults(runner, session, self.schedule, self.reporter)
        self.loop = TrainingLoop(
            runner,
            session,
            self.keys,
            self.data,
            attributes=self.attributes,
            observer_states=self.observer_states,
            pass_settings=self.pass_settings,
            reporter=self.reporter,
            closers=self.closers,
            calls=self.calls,
            checks=self.checks,
            loss=self.loss,
            train_metrics=self.train_metrics,
            agreement=self.agreement,
            update=self.update,
            run_window=self._run_window(),
            evaluator=self.evaluator,
            results=self.results,
            extensions=self.extensions,
        )
        self.saver.checks += [self.update.raise_pending_error, self.finite.check]
        self.saver.before.append(ExtraStates(runner).check)
        self.keys.called = (self.phases, self.audits, self.train_metrics)
        observers: list[Observer] = [
            self.checks,
            FirstGradients(runner, has_phases=self.phases is not None),
        ]
        if not runner.config.checkpoint.load_only:
            observers.append(self.unsaved)
        self.run_recorder = RunRecorder(runner, self.data)
        session.observers.extend([*observers, self.run_recorder])
        if self.metrics.has_objects:
            session.observers.append(
                MetricsInTraining(session, self.metrics, is_main=runner.is_main_process)
            )
        if self.audits is not None:
            self.audits.observe()

    def finish(self) -> None:
        if self.elastic is not None:
            self._follow_ranks(self.elastic)
        super().finish()

    def _follow_ranks(self, ranks: ElasticRanks) -> None:
        """Make what lets the training continue when ranks end or join."""
        runner, session, closers, elastic = self.runner, self.session, self.closers, load("elastic")
        elastic.check_program(runner)
        shards = None
        if runner.config.elastic.shard_state:
            shards = elastic.Shards(runner, ranks.member, ranks.domain, closers)
        main = elastic.MainProcess(runner, self.reporter, self.run_location, self.results)
        handover = elastic.Handover(
            runner,
            session,
            self.keys,
            self.live_state,
            loop=self.loop,
            results=self.results,
            reporter=self.reporter,
            shards=shards,
            has_state=not ranks.joins,
        )
        unchanged = elastic.UnchangedUntilStep(runner, self.attributes, handover.digest)
        open_update = elastic.OpenUpdate(
            runner,
            session,
            self.keys,
            self.update,
            loop=self.loop,
            unchanged=unchanged,
            closers=closers,
        )
        training: ElasticTraining = elastic.ElasticTraining(
            runner,
            ranks,
            session,
            self.data,
            update=open_update,
            handover=handover,
            main=main,
            shards=shards,
        )
        self.elastic_training = training
        self.extensions.append(training)
        # It raises `MembershipChanged` before the other observers hear of an update that is not made.
        session.observers.insert(0, training)
        if ranks.joins:
            # The other ranks have tried the evaluation, and wait for this one in an update.
            self.evaluator.has_tried = True

    def note_hook(self) -> None:
        """Call every hook until the next pass begins, which looks up again which of them do something."""
        if "loop" in vars(self):  # else the first training looks them up
            self.runner._enters_contexts = True
            self.update.moves_batches = True
            self.loop.has_pass_hook = True

    def _run_window(self) -> RunWindow:
        """Return what runs the micro-batches of an update."""
        update, config = self.update, self.runner.config
        # These two run the micro-batches of an update a second time.
        update.keeps_batches = (
            self.runner.fault_tolerance is not None or config.audit.replay_interval is not None
        )
        run_window = (
            update.run_window_that_fits if self.data.finds_micro_batch_size else update.run_window
        )
        if self.audits is None:
            return run_window
        self.audits.attach_to(update)
        return self.audits.around(run_window)
