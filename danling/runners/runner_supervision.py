"""What watches a run and keeps its figures: trackers, signals, heartbeat, garbage collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from typing import Any, TypeVar

from danling.reporting import BUILT_IN_TRACKERS, Reporter, Tracker, TrackerPlace
from danling.supervision import GcPacer, Heartbeat, SignalWatcher
from danling.training import TrainingSession
from danling.workspace import Workspace

from .facts import RunnerFacts

_T = TypeVar("_T")


class RunnerSupervision(RunnerFacts):
    """Opens and closes what watches a run and keeps its figures."""

    workspace: Workspace
    checkpoint_manager: Any
    _closers: ExitStack

    @cached_property
    def _session(self) -> TrainingSession:
        return TrainingSession()

    # What is seen of the run

    @cached_property
    def _reporter(self) -> Reporter:
        reporter = Reporter(
            is_main=self.is_main_process,
            world_size=self.world_size,
            seconds_between_lines=self.config.log_seconds,
        )
        self._closers.callback(reporter.trackers.close)
        return reporter

    def add_tracker(self, tracker: Tracker | Callable[[], Tracker]) -> None:
        """Send every figure of the run to a tracker of your own as well; call it in `__init__` or before `train`, on all ranks.

        It is opened once, when training first begins, gets what `metrics.jsonl` gets, is flushed at every checkpoint and at the end of
        every training, also one that fails, and is closed by `close`.

        Args:
            tracker: An object with `log(values, step)`, `flush()` and `close()`, used on the main process only; or something to call
                for one, such as its class, which is called on the main process only.

        Raises:
            TypeError: If it is neither.
            ValueError: If it was added before.
        """
        self._reporter.trackers.add(tracker)

    @property
    def trackers(self) -> list[Tracker]:
        """What figures are sent to: empty before training begins, and on all processes but the main one."""
        return self._reporter.trackers.opened

    def log_figures(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Send figures to every tracker, `metrics.jsonl` included. May be called on all ranks; the main process sends them.

        Args:
            values: Figures by name, usually `split/name`.
            step: Global step; `None` is that of `train_state`.
        """
        self.open_trackers()
        self._reporter.trackers.log(values, self.state.train.global_step if step is None else step)

    def open_trackers(self) -> None:
        """Open what keeps the figures, when training begins: a runner that only evaluates leaves an earlier run's alone.

        Called on all ranks.
        """
        if self._reporter.trackers.is_open:
            return
        if self.config.checkpoint.load_only and self.checkpoint_manager is not None:
            # It may look into the directory of another run, but its figures must not replace those that are there.
            self.checkpoint_manager.check_directory()
            self._run_place.write_figures(resumed=self.state.train.global_step > 0)
        self._reporter.trackers.open()
        for name in BUILT_IN_TRACKERS:
            getattr(self, f"init_{name}", partial(self._open_built_in_tracker, name))()

    def _open_built_in_tracker(self, name: str) -> None:
        place = TrackerPlace(self.config, self.workspace, self.instance, self.state.train.global_step)
        self._reporter.add_built_in(name, place)

    def init_tensorboard(self) -> None:
        """Open the TensorBoard writer on the main process when `config.tensorboard`; a resumed run goes on in its directory."""
        self._open_built_in_tracker("tensorboard")

    def init_wandb(self) -> None:
        """Open the Weights & Biases run on the main process when `config.wandb.enabled`."""
        self._open_built_in_tracker("wandb")

    # What watches it

    def init_signal_handlers(self) -> None:
        """Watch for SIGTERM, SIGINT and SIGUSR1 while training; the handlers are put back when it ends."""
        self._session.signals = SignalWatcher()
        self._session.signals.install()

    _heartbeat_is: tuple[Any, ...] | None = None
    """What the heartbeat was begun with."""

    def _begin_heartbeat(self) -> None:
        """Begin the heartbeat; where `__init__` has changed its settings or the run directory since, begin it anew."""
        wanted = (self.workspace.dir, *self.config.heartbeat.items())
        if wanted == self._heartbeat_is:
            return
        if self._session.heartbeat is not None:
            self._session.heartbeat.stop()
        self._heartbeat_is = wanted
        self.init_heartbeat()

    def init_heartbeat(self) -> None:
        """Start the heartbeat file of this rank when `config.heartbeat.enabled`, before `__init__` builds a model."""
        settings = self.config.heartbeat
        self._session.heartbeat = None
        if settings.enabled:
            directory = self.workspace.dir / settings.dir_name
            heartbeat = Heartbeat(directory, rank=self.rank, interval_seconds=settings.interval_seconds)
            self._session.heartbeat = heartbeat
            self._closers.callback(heartbeat.stop)

    def init_garbage_collection(self) -> None:
        """Pace Python's garbage collection in training, evaluation and inference when `config.gc.interval` is set."""
        settings = self.config.gc
        self._session.gc_pacer = None
        if settings.interval is not None:
            self._session.gc_pacer = GcPacer(
                settings.interval, generation=settings.generation, disable_automatic=settings.disable_automatic
            )

    def _collecting(self) -> AbstractContextManager[None]:
        return self._session.collecting()

    def _paced(self, batches: Iterator[_T]) -> Iterator[_T]:
        return self._session.paced(batches)
