"""What is opened around the training of a torch runner: trackers, signals, heartbeat, garbage collection."""

from __future__ import annotations

from danling.supervision import GcPacer, Heartbeat, SignalWatcher
from danling.workspace import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker

from .torch_data import TorchData


class TorchSupervision(TorchData):
    """Opens and closes what watches a run and keeps its figures."""

    # What a hook that is overridden with nothing leaves as it is.
    heartbeat: Heartbeat | None = None
    gc_pacer: GcPacer | None = None

    def _open_supervision(self) -> None:
        self.trackers: list[Tracker] | None = None
        self.signals: SignalWatcher | None = None
        self.init_heartbeat()
        self.init_garbage_collection()
        for source in self.sources.values():
            self._closers.callback(source.close)

    def open_trackers(self) -> None:
        """Open what keeps the figures, when training begins: a runner that only evaluates leaves an earlier run's alone.

        Called on all ranks.
        """
        if self.trackers is not None:
            return
        if self.config.checkpoint.load_only and self.checkpoint_manager is not None:
            # It may look into the directory of another run, but its figures must not replace those that are there.
            self.checkpoint_manager.check_directory()
        self.trackers = []
        if self.is_main_process:
            self._track(JsonlTracker(self.workspace.jsonl_file, resume_step=self.state.train.global_step))
        self.init_tensorboard()
        self.init_wandb()

    def _track(self, tracker: Tracker) -> None:
        assert self.trackers is not None
        self.trackers.append(tracker)
        self._closers.callback(tracker.close)

    def init_tensorboard(self) -> None:
        """Open the TensorBoard writer on the main process when `config.tensorboard`; a resumed run goes on in its directory."""
        if self.config.tensorboard and self.is_main_process:
            step = self.state.train.global_step
            earlier = self.workspace.latest_tensorboard_dir() if step else None
            directory = earlier or self.workspace.tensorboard_dir
            self._track(TensorBoardTracker(directory, purge_step=step + 1 if step else None))

    def init_wandb(self) -> None:
        """Open the Weights & Biases run on the main process when `config.wandb.enabled`."""
        settings = self.config.wandb
        if not settings.enabled or not self.is_main_process:
            return
        self._track(
            WandbTracker(
                project=settings.project or self.config.lineage,
                entity=settings.entity,
                group=settings.group or self.config.experiment,
                name=settings.name or self.id,
                job_type=settings.job_type,
                tags=settings.tags,
                dir=settings.dir or self.workspace.dir,
                mode=settings.mode,
                run_id=self.id,
                config=self.config.plain(),
            )
        )

    def init_signal_handlers(self) -> None:
        """Watch for SIGTERM, SIGINT and SIGUSR1 while training; the handlers are put back when it ends. Called on all ranks."""
        self.signals = SignalWatcher()
        self.signals.install()

    def init_heartbeat(self) -> None:
        """Start the heartbeat file of this rank when `config.heartbeat.enabled`. Called on all ranks."""
        settings = self.config.heartbeat
        self.heartbeat = None
        if settings.enabled:
            directory = self.workspace.dir / settings.dir_name
            self.heartbeat = Heartbeat(directory, rank=self.rank, interval_seconds=settings.interval_seconds)
            self._closers.callback(self.heartbeat.stop)

    def init_garbage_collection(self) -> None:
        """Pace Python's garbage collection when `config.gc.interval` is set. Called on all ranks."""
        settings = self.config.gc
        self.gc_pacer = None
        if settings.interval is not None:
            self.gc_pacer = GcPacer(
                settings.interval, generation=settings.generation, disable_automatic=settings.disable_automatic
            )
            self._closers.callback(self.gc_pacer.close)
