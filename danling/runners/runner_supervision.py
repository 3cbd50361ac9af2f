"""What watches a run and keeps its figures: trackers, signals, heartbeat, garbage collection."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property
from typing import Any, TypeVar

from danling.reporting import JsonlTracker, TensorBoardTracker, Tracker, TrackerSet, WandbTracker
from danling.supervision import GcPacer, Heartbeat, SignalWatcher
from danling.utils.secrets import secret_values
from danling.workspace import Workspace

from .facts import RunnerFacts

logger = logging.getLogger("danling")

_T = TypeVar("_T")


class RunnerSupervision(RunnerFacts):
    """Opens and closes what watches a run and keeps its figures."""

    workspace: Workspace
    checkpoint_manager: Any
    _closers: ExitStack

    # What a hook that is overridden with nothing leaves as it is.
    heartbeat: Heartbeat | None = None
    gc_pacer: GcPacer | None = None
    signals: SignalWatcher | None = None

    # Trackers

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
        self._trackers.add(tracker)

    @cached_property
    def _trackers(self) -> TrackerSet:
        trackers = TrackerSet(is_main=self.is_main_process)
        self._closers.callback(trackers.close)
        return trackers

    @property
    def trackers(self) -> list[Tracker]:
        """What figures are sent to: empty before training begins, and on all processes but the main one."""
        return self._trackers.opened

    def log_figures(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Send figures to every tracker, `metrics.jsonl` included. May be called on all ranks; the main process sends them.

        Args:
            values: Figures by name, usually `split/name`.
            step: Global step; `None` is that of `train_state`.
        """
        self.open_trackers()
        self._trackers.log(values, self.state.train.global_step if step is None else step)

    def open_trackers(self) -> None:
        """Open what keeps the figures, when training begins: a runner that only evaluates leaves an earlier run's alone.

        Called on all ranks.
        """
        if self._trackers.is_open:
            return
        if self.config.checkpoint.load_only and self.checkpoint_manager is not None:
            # It may look into the directory of another run, but its figures must not replace those that are there.
            self.checkpoint_manager.check_directory()
            self._run_place.write_figures(resumed=self.state.train.global_step > 0)
        self._trackers.open()
        self._track(lambda: JsonlTracker(self.workspace.jsonl_file, resume_step=self.state.train.global_step))
        self.init_tensorboard()
        self.init_wandb()

    def _flush_trackers(self) -> None:
        """Flush what a training has logged, however it ended; what fails here must not hide how."""
        try:
            self._trackers.flush()
        except Exception:
            logger.exception("A tracker could not be flushed.")

    def _track(self, tracker: Callable[[], Tracker]) -> None:
        self._trackers.add(tracker)

    def init_tensorboard(self) -> None:
        """Open the TensorBoard writer on the main process when `config.tensorboard`; a resumed run goes on in its directory."""
        if self.config.tensorboard and self.is_main_process:
            step = self.state.train.global_step
            earlier = self.workspace.latest_tensorboard_dir() if step else None
            directory = earlier or self.workspace.tensorboard_dir
            self._track(lambda: TensorBoardTracker(directory, purge_step=step + 1 if step else None))

    def init_wandb(self) -> None:
        """Open the Weights & Biases run on the main process when `config.wandb.enabled`."""
        settings = self.config.wandb
        if not settings.enabled or not self.is_main_process:
            return
        self._track(
            lambda: WandbTracker(
                project=settings.project or self.config.lineage,
                entity=settings.entity,
                group=settings.group or self.config.experiment,
                name=settings.name or self.instance,
                job_type=settings.job_type,
                tags=settings.tags,
                dir=settings.dir or self.workspace.dir,
                mode=settings.mode,
                run_id=self.instance,
                config=self.config.public(),
                secrets=secret_values(self.config.plain(), self.config.secret_keys or ()),
            )
        )

    def init_signal_handlers(self) -> None:
        """Watch for SIGTERM, SIGINT and SIGUSR1 while training; the handlers are put back when it ends. Called on all ranks."""
        self.signals = SignalWatcher()
        self.signals.install()

    _heartbeat_is: tuple[Any, ...] | None = None
    """What the heartbeat was begun with."""

    def _begin_heartbeat(self) -> None:
        """Begin the heartbeat; where `__init__` has changed its settings or the run directory since, begin it anew."""
        wanted = (self.workspace.dir, *self.config.heartbeat.items())
        if wanted == self._heartbeat_is:
            return
        if self.heartbeat is not None:
            self.heartbeat.stop()
        self._heartbeat_is = wanted
        self.init_heartbeat()

    def init_heartbeat(self) -> None:
        """Start the heartbeat file of this rank when `config.heartbeat.enabled`, before `__init__` builds a model. Called on all ranks."""
        settings = self.config.heartbeat
        self.heartbeat = None
        if settings.enabled:
            directory = self.workspace.dir / settings.dir_name
            self.heartbeat = Heartbeat(directory, rank=self.rank, interval_seconds=settings.interval_seconds)
            self._closers.callback(self.heartbeat.stop)

    def init_garbage_collection(self) -> None:
        """Pace Python's garbage collection in training, evaluation and inference when `config.gc.interval` is set. Called on all ranks."""
        settings = self.config.gc
        self.gc_pacer = None
        if settings.interval is not None:
            self.gc_pacer = GcPacer(
                settings.interval, generation=settings.generation, disable_automatic=settings.disable_automatic
            )

    def _collecting(self) -> AbstractContextManager[Any]:
        return self.gc_pacer.active() if self.gc_pacer is not None else nullcontext()

    def _paced(self, batches: Iterator[_T]) -> Iterator[_T]:
        return batches if self.gc_pacer is None else self.gc_pacer.paced(batches)
