"""Where a run and the commands find checkpoints that lie in object stores: those of the run itself, and what a URL names."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from yaml import YAMLError

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointNotFound
from danling.checkpoints.manifest import is_name
from danling.checkpoints.store import SUFFIX, CheckpointStore
from danling.distributed.environment import is_first_on_machine
from danling.utils.plain import parse_yaml

from .brought import RemoteFiles, RemoteTargets
from .errors import RemoteMissing
from .layout import RunLayout
from .store import RemoteStore, is_url, open_store
from .stored_files import bring_files
from .stored_run import Place, StoredRun, place_of

logger = logging.getLogger("danling")

_BROUGHT = f"{storage.STAGED}from-"
_CONFIG = "metadata/config.full.yaml"
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".ckpt")


class RemoteSources:
    """Where a manager finds checkpoints in object stores: those of its run, and what a URL names."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        connect: Callable[[str], RemoteStore],
        home: tuple[str, RunLayout] | None,
    ) -> None:
        self._directory = directory
        self._run_id = run_id
        self._connect = connect
        self._home = home
        self._others: dict[str, list[RemoteFiles | RemoteTargets]] = {}

    def own(self) -> list[CheckpointStore]:
        """Return the stores of the run itself."""
        run = self.home
        return [*self._stores(self._directory, run, is_home=True)] if run is not None else []

    @cached_property
    def home(self) -> StoredRun | None:
        """The run itself in its store, `None` without one."""
        return None if self._home is None else StoredRun(self._connect(self._home[0]), self._home[1])

    def bring_files(self, directory: Path) -> None:
        """Bring the other files of the run, such as its metrics, into its directory; see `danling.remote.run_mirror`."""
        if self.home is not None:
            brought = bring_files(self.home.store, self.home.layout, directory)
            if brought:
                logger.info("Brought %d files of the run from %s.", len(brought), self.home.url)

    def stored_seed(self, asked: str | None) -> int | None:
        """Return the seed of the checkpoint that a run on an empty machine will resume from; `None` where there is none."""
        if is_url(asked):
            place = place_of(str(asked))
            store, layout = self._connect(place.base), place.layout
        elif self.home is not None:
            store, layout = self.home.store, self.home.layout
        else:
            return None
        try:
            settings = parse_yaml(store.get(layout.file(_CONFIG)).decode())
        except (RemoteMissing, ValueError, YAMLError):
            return None
        seed = settings.get("seed") if isinstance(settings, dict) else None
        return seed if isinstance(seed, int) else None

    def named(self, source: str | Path) -> tuple[list[CheckpointStore], str] | None:
        """Return the stores to look in for a URL, and the name to look for; `None` for what is no URL."""
        if not is_url(source):
            return None
        place = place_of(str(source))
        return list(self._named(place)), place.name

    def _named(self, place: Place) -> list[RemoteFiles | RemoteTargets]:
        key = f"{place.base}/{place.layout.root}"
        if key not in self._others:
            run = StoredRun(self._connect(place.base), place.layout)
            self._others[key] = self._stores(self._place_for(key), run, is_home=False)
        files, targets = self._others[key]
        return {True: [files], False: [targets], None: [files, targets]}[place.file]

    def bring_file(self, url: str) -> Path | None:
        """Bring what another program wrote, and return where it lies now; `None` for the URL of a run. May be called on all ranks."""
        parent, _, name = url.rpartition("/")
        if not name.endswith(_WEIGHTS) or is_name(name.removesuffix(SUFFIX)):
            return None
        path = self._place_for(url) / name
        if is_first_on_machine():
            storage.make_directory(path.parent)
            chunks = self._connect(parent).chunks(name)
            storage.write_file(path, lambda writer: [writer.write(piece) for piece in chunks])
        return path

    def brought(self, url: str) -> Path:
        """Bring a checkpoint that a URL names, and return its file or target."""
        place = place_of(url)
        for store in self._named(place):
            found = store.find(place.name)
            if found is not None:
                store.verify(found, "full")
                return found
        raise CheckpointNotFound(f"Expected a checkpoint at {url}. Received: none. Name one that is there.")

    def release(self) -> None:
        """Remove what was brought of other runs: it has been read."""
        if self._others and is_first_on_machine():
            for name in storage.names(self._directory):
                if name.startswith(_BROUGHT):
                    storage.remove_tree(self._directory / name)
        self._others.clear()

    def _stores(self, directory: Path, run: StoredRun, *, is_home: bool) -> list[RemoteFiles | RemoteTargets]:
        return [kind(directory, run, run_id=self._run_id, is_home=is_home) for kind in (RemoteFiles, RemoteTargets)]

    def _place_for(self, url: str) -> Path:
        # The same on all ranks, and a name that the next start removes if this one is killed.
        return self._directory / f"{_BROUGHT}{hashlib.sha256(url.encode()).hexdigest()[:16]}"


@contextmanager
def local_copy(
    source: str | Path,
    *,
    connect: Callable[[str], RemoteStore] = open_store,
    files: Sequence[str] = (),
) -> Iterator[Path]:
    """Yield the path of a checkpoint: of a copy that was verified, where a URL names it. The copy is removed when the context ends."""
    if not is_url(source):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="danling-copy-") as folder:
        sources = RemoteSources(Path(folder), run_id="", connect=connect, home=None)
        path = sources.bring_file(str(source))
        if path is None:
            path = sources.brought(str(source))
            place = place_of(str(source))
            for name in files:
                bring_files(connect(place.base), place.layout, Path(folder), below=name)
        yield path
