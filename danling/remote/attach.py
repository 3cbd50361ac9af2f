"""Attaches object stores to a runner: where it finds checkpoints that are not in its directory, and where its run is copied."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from danling.checkpoints import read_config

from .contents import runs_of_id
from .layout import RunLayout
from .mirror import MirrorSettings
from .run_mirror import RunMirror
from .sources import RemoteSources, local_copy
from .store import RemoteSettings, RemoteStore, open_store

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner


class RemoteStores:
    """The object stores that a run names: its own copy in one, and those of other runs that it reads.

    Args:
        runner: The runner. Its configuration may change until its directory is open.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self._mirror: RunMirror | None = None

    def connect(self, url: str) -> RemoteStore:
        """Return a client of a store, with the settings of `checkpoint.remote`."""
        remote = self._runner.config.checkpoint.remote
        settings = RemoteSettings(
            part_size=remote.part_size, timeout_seconds=remote.timeout_seconds, retries=remote.retries
        )
        store = open_store(url, settings=settings, credentials=self._runner.remote_credentials)
        store.starting = True
        return store

    def runs(self, family: str, id: str) -> list[str]:
        """Return the names of the runs of an id that the store of the run has; none without a store. May be called on one rank."""
        url = self._runner.config.checkpoint.remote.url
        return runs_of_id(self.connect(url), family, id) if url is not None else []

    @cached_property
    def sources(self) -> RemoteSources:
        """Where checkpoints are found: those of the run, and what a URL names."""
        runner, place = self._runner, self._runner._run_place
        url, layout = runner.config.checkpoint.remote.url, RunLayout(place.family, place.instance)
        return RemoteSources(
            runner.workspace.checkpoints,
            run_id=runner.id,
            connect=self.connect,
            home=(url, layout) if url is not None else None,
        )

    def has(self, name: str) -> bool:
        """Whether the store of the run has a checkpoint of a name. May be called on one rank."""
        home = self.sources.home
        return home is not None and name in home.listed.manifests | home.listed.pointers

    def bring_files(self) -> None:
        """Download metrics and other files of a resumed run, so that its curves continue on a new machine. Called on all ranks."""
        runner, config = self._runner, self._runner.config
        if config.checkpoint.remote.url and config.auto_resume and not config.checkpoint.load_only:
            directory = runner._run_place.dir
            runner.world.on_first(lambda: self.sources.bring_files(directory))

    def claim(self) -> None:
        """Become the writer of the run in its store, and copy every save from now on; without a store do nothing. Called on all ranks."""
        home, config, manager = self.sources.home, self._runner.config, self._runner.checkpoint_manager
        if home is None or config.checkpoint.load_only:
            return
        remote = config.checkpoint.remote
        settings = MirrorSettings(remote.required, remote.keep_latest_k, remote.interval, config.log_seconds)
        self._mirror = RunMirror(
            home.store, home.layout, directory=self._runner.workspace.dir, manager=manager, settings=settings
        )
        # What was seen of the run before this process became its writer may have changed.
        home.forget()

    def start_mirroring(self) -> None:
        """Copy what the run goes on from; see `RunMirror.begin`. Called on all ranks."""
        if self._mirror is not None:
            self._mirror.begin()
            # From now on an upload that fails is tried again in the background, and training goes on.
            self._mirror.run.store.starting = False

    def figures(self, step: int) -> Mapping[str, Mapping[str, float]]:
        """Return what is logged of the copy, by group; nothing without one."""
        return self._mirror.figures(step) if self._mirror is not None else {}


def read_config_at(url: str) -> dict[str, object]:
    """Return the configuration of the checkpoint at a URL, as plain values. May be called on one rank."""
    with local_copy(url) as path:
        return read_config(path)
