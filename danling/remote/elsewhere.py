"""A run in object stores, as its runner holds it: where it looks for checkpoints, and where it is copied to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

from danling.checkpoints.absent import NoCheckpoints
from danling.checkpoints.base import CheckpointManager
from danling.config import RunnerConfig

from .contents import runs_of_id
from .layout import RunLayout
from .mirror import MirrorSettings
from .run_mirror import RunMirror
from .sources import RemoteSources
from .store import Credentials, RemoteSettings, RemoteStore, open_store


class RunElsewhere:
    """Opens the stores that a run names, once each thing is known of it that they take."""

    def __init__(
        self,
        settings: Callable[[], RunnerConfig],
        *,
        credentials: Credentials,
        at: Callable[[], tuple[Path, str, RunLayout]],
    ) -> None:
        self._settings, self._credentials, self._at = settings, credentials, at
        self._mirror: RunMirror | None = None

    def connect(self, url: str) -> RemoteStore:
        """Return a client of a store, with the settings of `checkpoint.remote`."""
        remote = self._settings().checkpoint.remote
        settings = RemoteSettings(
            part_size=remote.part_size, timeout_seconds=remote.timeout_seconds, retries=remote.retries
        )
        store = open_store(url, settings=settings, credentials=self._credentials)
        store.starting = True
        return store

    def runs(self, family: str, id: str) -> list[str]:
        """Return the names of the runs of an id that the store of the run has; none without a store. May be called on one rank."""
        url = self._settings().checkpoint.remote.url
        return runs_of_id(self.connect(url), family, id) if url is not None else []

    @cached_property
    def sources(self) -> RemoteSources:
        """Where checkpoints are found: those of the run, and what a URL names."""
        url = self._settings().checkpoint.remote.url
        checkpoints, run_id, layout = self._at()
        return RemoteSources(
            checkpoints, run_id=run_id, connect=self.connect, home=(url, layout) if url is not None else None
        )

    def has(self, name: str) -> bool:
        """Whether the store of the run has a checkpoint of a name. May be called on one rank."""
        home = self.sources.home
        return home is not None and name in home.listed.manifests | home.listed.pointers

    def bring_files(self, directory: Path, *, on_first: Callable[[Callable[[], None]], None]) -> None:
        """Bring the metrics and other files of a run that goes on after its machine was lost. Called on all ranks.."""
        config = self._settings()
        if config.checkpoint.remote.url and config.auto_resume and not config.checkpoint.load_only:
            on_first(lambda: self.sources.bring_files(directory))

    def copy(self, directory: Path, manager: CheckpointManager | NoCheckpoints) -> None:
        """Become the writer of the run in its store, and copy every save from now on; without a store do nothing. Called on all ranks."""
        home, config = self.sources.home, self._settings()
        if home is None or config.checkpoint.load_only or isinstance(manager, NoCheckpoints):
            return
        remote = config.checkpoint.remote
        settings = MirrorSettings(remote.required, remote.keep_latest_k, remote.interval, config.log_seconds)
        self._mirror = RunMirror(home.store, home.layout, directory=directory, manager=manager, settings=settings)
        # What was seen of the run before this process became its writer may have changed.
        home.forget()

    def begin(self) -> None:
        """Copy what the run goes on from; see `RunMirror.begin`. Called on all ranks."""
        if self._mirror is not None:
            self._mirror.begin()
            # From now on an upload that fails is tried again in the background, and training goes on.
            self._mirror.run.store.starting = False

    def figures(self, step: int) -> Mapping[str, Mapping[str, float]]:
        """Return what is logged of the copy, by group; nothing without one."""
        return self._mirror.figures(step) if self._mirror is not None else {}
