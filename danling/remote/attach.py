"""Attaches object stores to a runner: where it finds checkpoints that are not in its directory, and where its run is copied."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from danling.checkpoints import read_config, storage
from danling.checkpoints.directory import SUMS, DiskSharing, TargetStore
from danling.checkpoints.manager import CheckpointManager, Saved
from danling.checkpoints.manifest import is_name
from danling.distributed.environment import is_first_on_machine
from danling.utils.process import in_notebook
from danling.workspace.workspace import is_unfinished

from .lease import SECONDS, Lease
from .mirror import CheckpointMirror, MirrorSettings
from .sources import RemoteSources, local_copy
from .store import RemoteError, RemoteSettings, RemoteStore, open_store
from .stored_run import RemoteRun, RunLayout, runs_of_id

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

_LOOK_SECONDS = 2.0


class RunMirror:
    """Copies a run to an object store. Constructed on all ranks; rank 0 alone holds the lease and makes saves visible."""

    def __init__(
        self,
        store: RemoteStore,
        layout: RunLayout,
        *,
        directory: Path,
        manager: CheckpointManager,
        settings: MirrorSettings,
        lease_seconds: float = SECONDS,
    ) -> None:
        self.run = RemoteRun(store, layout)
        self._manager = manager
        self._lease = Lease(store, layout.lock, seconds=lease_seconds, again=in_notebook())
        rank, size = manager.domain.rank, manager.domain.size
        self.mirror = CheckpointMirror(
            manager.directory,
            self.run,
            rank=rank,
            alone=size == 1 or not issubclass(manager.store_class, TargetStore),
            settings=settings,
            before_commit=FileMirror(store, layout, directory).copy,
        )
        self.mirror.lost = lambda: self._lease.lost
        self.mirror.on_close = self._lease.release
        manager.on_main(self._open)
        manager.mirror = self.mirror
        if size > 1:
            manager.checkpoints.share(self._disk_sharing(directory))

    def _disk_sharing(self, directory: Path) -> DiskSharing:
        """Find out whether all ranks see the disk of the main process."""

        def written() -> Path:
            storage.make_directory(directory)
            path = storage.staged_name(directory)
            path.touch()
            return path

        token = self._manager.on_main(written)
        seen = _is_seen(token)
        all_see = all(self._manager.domain.gather_objects(seen))
        self._manager.on_main(lambda: storage.remove(token))
        return DiskSharing(is_split=not all_see, follows=not seen and is_first_on_machine())

    def _open(self) -> None:
        self._lease.acquire()
        try:
            self.run.open()
        except BaseException:
            self._lease.release()
            raise

    def begin(self) -> None:
        """Copy the checkpoints that the store lacks: the one that the run goes on from is safe before its first save. On all ranks."""
        self._manager.on_main(self._begin)

    def _begin(self) -> None:
        here = [store for store in self._manager.checkpoints.stores if not (store.is_elsewhere or store.is_part)]
        local = [(record, store) for store in here for record in store.records(complete=True)]
        if not local and self._manager.checkpoints.resumed is None and self.run.records:
            newest = max(self.run.records, key=lambda record: record.sequence)
            raise RemoteError(
                f"Expected {self.run.url} to hold no run, since this one begins from scratch. Received: one at step {newest.step}. Set "
                "auto_resume=true to go on from it, or give this run another lineage."
            )
        # Ask the store for everything before the thread begins, which tracks the objects from then on.
        newest_there = [r for r in self.run.records if r.name != "model"]
        if newest_there:
            self.mirror.committed_step = max(newest_there, key=lambda record: record.sequence).step
        there = {record.name: record.sequence for record in self.run.records}
        # Targets that no name leads to are recorded under their own.
        missing = sorted(
            ((r, store) for r, store in local if r.sequence > there.get(r.name, -1) and is_name(r.name)),
            key=lambda pair: (pair[0].sequence, pair[0].name == "latest"),
        )
        # A process that was killed may have left files of a save that never became visible, or that retention had given up.
        coming = {store.target(store.path(r.name)).name for r, store in missing if isinstance(store, TargetStore)}
        self.mirror.sweep(None, coming)
        for _, group in groupby(missing, key=lambda pair: (pair[0].sequence, isinstance(pair[1], TargetStore))):
            pairs = list(group)
            record, store = pairs[0]
            names = tuple(r.name for r, _ in pairs)
            if isinstance(store, TargetStore):
                target = store.target(store.path(record.name))
                own = sorted(storage.names(target) - {SUMS})
                self.mirror.saved(Saved(record.sequence, record.step, names, target.name, tuple(own)))
            else:
                self.mirror.saved(Saved(record.sequence, record.step, names))

    def figures(self, step: int) -> dict[str, dict[str, float]]:
        """Return the logged figures of the copy, by group; see `CheckpointMirror.figures`."""
        return {"remote": self.mirror.figures(step)}


def _is_seen(path: Path) -> bool:
    """Whether a file that has just been made on another machine is there: a network disk may show it a moment later."""
    end = time.monotonic() + _LOOK_SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


_DIRECTORIES = ("metadata", "logs", "tensorboard")
_FILES = ("metrics.jsonl", "results.json", "latest.json", "best.json", "streams.json", "digests.jsonl")


class FileMirror:
    """Copies the files of a run directory that have changed since they were copied last. On one thread."""

    def __init__(self, store: RemoteStore, layout: RunLayout, directory: Path) -> None:
        self._store = store
        self._layout = layout
        self._directory = directory
        self._copied: dict[str, tuple[int, int]] = {}
        self._unread: set[str] = set()

    def copy(self) -> None:
        """Copy the files that have changed. A file that is being written to goes up as it is now, and again the next time."""
        for path in run_files(self._directory):
            name = path.relative_to(self._directory).as_posix()
            try:
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    continue  # a pipe would be waited for
                state = (found.st_size, found.st_mtime_ns)
                if self._copied.get(name) == state:
                    continue
                # Read the whole file at once: a line appended meanwhile must not go up in part.
                content = path.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                # A save is worth more than a log that cannot be read.
                if name not in self._unread:
                    self._unread.add(name)
                    logger.warning("%s is not copied to %s: %s", path, self._store.url, error)
                continue
            self._store.put(self._layout.file(name), content)
            self._copied[name] = state


def run_files(directory: Path) -> Iterator[Path]:
    """Yield the files of a run directory that belong to the run, apart from its checkpoints."""
    for name in _FILES:
        if (directory / name).is_file():
            yield directory / name
    for name in _DIRECTORIES:
        for place, _, files in os.walk(directory / name):
            yield from (Path(place, file) for file in sorted(files) if not is_unfinished(file))


class RemoteStores:
    """The object stores that a run names: its own copy in one, and those of other runs that it reads."""

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
            connect=self.connect,
            home=(url, layout) if url is not None else None,
        )

    def has(self, name: str) -> bool:
        """Whether the store of the run has a checkpoint of a name. May be called on one rank."""
        home = self.sources.home
        return home is not None and name in home.manifests | home.pointers

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
        """Return the logged figures of the copy, by group; nothing without one."""
        return self._mirror.figures(step) if self._mirror is not None else {}


def read_config_at(url: str) -> dict[str, object]:
    """Return the configuration of the checkpoint at a URL, as plain values. May be called on one rank."""
    with local_copy(url) as path:
        return read_config(path)
