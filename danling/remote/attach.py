"""Attaches object stores to a runner: where it finds checkpoints that are not in its directory, and where its run is copied."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from yaml import YAMLError

from danling.checkpoints import read_config
from danling.utils.plain import parse_yaml

from .mirror import RunMirror
from .sources import RemoteSources, bring_files, local_copy
from .store import RemoteMissing, RemoteSettings, RemoteStore, open_store
from .stored_run import RunLayout, StoredRun, place_of, runs_of_id

if TYPE_CHECKING:
    from danling.reporting import Reporter
    from danling.runners.base_runner import BaseRunner
    from danling.workspace.workspace import RunLocation

logger = logging.getLogger("danling")


class RemoteStores:
    """The object stores that a run names: its own copy in one, and those of other runs that it reads."""

    run_location: RunLocation
    """The directory of the run; set by `follow` when that is chosen."""

    def __init__(self, runner: BaseRunner, reporter: Reporter) -> None:
        self._runner = runner
        self._reporter = reporter
        self._mirror: RunMirror | None = None
        self._followed: dict[str, object] = {}
        """The settings of `checkpoint.remote` that `home` and `sources` were made with."""

    def connect(self, url: str) -> RemoteStore:
        """Return a client of a store, with the settings of `checkpoint.remote`."""
        remote = self._runner.config.checkpoint.remote
        settings = RemoteSettings(
            part_size=remote.part_size,
            timeout_seconds=remote.timeout_seconds,
            retries=remote.retries,
        )
        store = open_store(url, settings=settings, credentials=self._runner.remote_credentials)
        store.starting = True
        return store

    def follow(self, run_location: RunLocation) -> None:
        """Belong to the directory of the run, and to the store that the settings name now: the program's `__init__` may change them."""
        self.run_location = run_location
        settings = dict(self._runner.config.checkpoint.remote.items())
        if settings != self._followed:
            self._followed = settings
            # The seed may have been looked up before, in the store that was named then.
            for name in ("home", "sources"):
                self.__dict__.pop(name, None)

    @cached_property
    def home(self) -> StoredRun:
        """The run itself, where `checkpoint.remote.url` is set."""
        url = str(self._runner.config.checkpoint.remote.url)
        return StoredRun(
            self.connect(url), RunLayout(self.run_location.family, self.run_location.instance)
        )

    @cached_property
    def sources(self) -> RemoteSources:
        """Where checkpoints are found: those of the run, and what a URL names."""
        home = self.home if self._runner.config.checkpoint.remote.url is not None else None
        return RemoteSources(self._runner.workspace.checkpoints, connect=self.connect, home=home)

    # Called on one rank

    def runs(self, family: str, id: str) -> list[str]:
        """Return the names of the runs of an id that the store of the run has."""
        return runs_of_id(self.connect(str(self._runner.config.checkpoint.remote.url)), family, id)

    def has(self, name: str) -> bool:
        """Whether the store of the run has a checkpoint of a name."""
        return self.home.has(name) or self.home.has(f"{name}.pth")

    def stored_seed(self, asked: str | None) -> int | None:
        """Return the seed of the checkpoint that a run on an empty machine will resume from; `None` where there is none."""
        run = self.home
        if asked and "://" in asked:
            place = place_of(asked)
            run = StoredRun(self.connect(place.base), place.layout)
        # The small description, so that no checkpoint is downloaded before the run is restored.
        try:
            settings = parse_yaml(
                run.store.get(run.layout.file("metadata/config.full.yaml")).decode()
            )
        except (RemoteMissing, ValueError, YAMLError):
            return None
        seed = settings.get("seed") if isinstance(settings, dict) else None
        return seed if isinstance(seed, int) else None

    # Called on all ranks

    def bring_files(self) -> None:
        """Download metrics and other files of a resumed run, so that its curves continue on a new machine."""
        if self._runner.config.auto_resume and not self._runner.config.checkpoint.load_only:
            self._runner.world.on_first(self._bring_files)

    def _bring_files(self) -> None:
        brought = bring_files(self.home.store, self.home.layout.files, self.run_location.dir)
        if brought:
            logger.info("Brought %d files of the run from %s.", brought, self.home.url)

    def claim(self) -> None:
        """Become the writer of the run in its store, and copy every save from now on."""
        runner, config = self._runner, self._runner.config
        if config.checkpoint.load_only:
            return
        # A second view of the run: the thread of the mirror changes what it remembers of the store.
        self._mirror = RunMirror(
            StoredRun(self.home.store, self.home.layout),
            runner.checkpoint_manager,
            runner.workspace.dir,
            config.checkpoint.remote,
            seconds_between_lines=config.log_seconds,
        )
        self._mirror.open()
        self._reporter.figures.append(self.figures)
        # What was seen of the run before this process became its writer may have changed.
        self.home.forget()

    def start_copying(self) -> None:
        """Copy what the run goes on from; see `RunMirror.begin`."""
        if self._mirror is not None:
            self._mirror.begin()
            # From now on an upload that fails is tried again in the background, and training goes on.
            self._mirror.run.store.starting = False

    def figures(self, step: int) -> dict[str, dict[str, float]]:
        """Return the logged figures of the copy, by group; nothing without one."""
        return {"remote": self._mirror.figures(step)} if self._mirror is not None else {}


def read_config_at(url: str) -> dict[str, object]:
    """Return the configuration of the checkpoint at a URL, as plain values. May be called on one rank."""
    with local_copy(url) as path:
        return read_config(path)
