"""A run in a store: where its objects are, which of them count, how they are read, and how its one writer makes, moves and removes names.

Below `url/lineage[-code_id]/id/` is what the run directory has, under the same names:

    lock                                         who writes, see `danling.remote.lease`
    checkpoints/objects/<sha256>                 contents of file checkpoints; equal contents are stored once
    checkpoints/<name>.pth.sha256                the manifest of a file checkpoint: its digest names the object
    checkpoints/targets/<target>/<file>          files of a sharded checkpoint, as in the run directory
    checkpoints/targets/<target>/manifest.sha256 the manifest of a sharded checkpoint
    checkpoints/<name>                           the name of the target that `latest`, `best`, ... lead to
    files/<path>                                 the run's other files, below the path that they have in the run directory

Order of puts: a file checkpoint counts under a name when the manifest of that name is there. It is put after the object that it
names, and the one of `latest` is put last, as on the disk. A target counts when its manifest is there; it is put after all other files of
the target, and before the pointers. Every one of these puts is atomic, so that nothing that counts is ever incomplete.
Removal goes in the reverse order: pointer or manifest first, contents last. An object that no manifest names, and files of a target
without a manifest, are what a killed upload leaves; the next writer removes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from danling.checkpoints import storage
from danling.checkpoints.directory import FILE_SUMS as SUMS_OF_FILE
from danling.checkpoints.directory import SUFFIX, SUMS, TARGETS, is_target
from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.checkpoints.manifest import Manifest, Record, is_name, newest, on_line, to_delete

from .store import RemoteMissing, RemoteStore, check_url

CHECKPOINTS = "checkpoints"
FILES = "files"
LOCK = "lock"
OBJECTS = "objects"
FILE_SUMS = f"{SUFFIX}{SUMS_OF_FILE}"

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RunLayout:
    """Keys of the objects of one run."""

    family: str
    run: str

    @property
    def root(self) -> str:
        """The prefix of all keys of the run, without a slash at its end."""
        return f"{self.family}/{self.run}"

    @property
    def lock(self) -> str:
        return f"{self.root}/{LOCK}"

    @property
    def checkpoints(self) -> str:
        """Prefix of everything about checkpoints, without a slash at its end."""
        return f"{self.root}/{CHECKPOINTS}"

    @property
    def files(self) -> str:
        """Prefix of the run's other files, without a slash at its end."""
        return f"{self.root}/{FILES}"

    def file(self, path: str) -> str:
        """Return the key of another file of the run, by its path relative to the run directory."""
        return f"{self.files}/{path}"


# Keys about checkpoints, relative to `RunLayout.checkpoints`. That of a pointer is its name.


def object_key(digest: str) -> str:
    """Return the key of the contents of a file checkpoint with this SHA-256."""
    return f"{OBJECTS}/{digest}"


def manifest_key(name: str) -> str:
    """Return the key of the manifest of a file checkpoint, such as `latest`, or of a target."""
    return target_key(name, SUMS) if is_target(name) else f"{name}{FILE_SUMS}"


def target_key(target: str, file: str) -> str:
    return f"{TARGETS}/{target}/{file}"


class Described(NamedTuple):
    """A name in a store, with the manifest that it leads to."""

    name: str
    target: str | None
    manifest: Manifest

    @property
    def record(self) -> Record:
        """Its record, under this name."""
        return replace(self.manifest.record, name=self.name)

    def key(self, file: str) -> str:
        """Return the key of one of its files, relative to `RunLayout.checkpoints`."""
        return object_key(self.manifest.files[file][1]) if self.target is None else target_key(self.target, file)


class StoredRun:
    """The checkpoints of a run in a store. What was listed and read of it is remembered until `forget`."""

    def __init__(self, store: RemoteStore, layout: RunLayout) -> None:
        self.store = store
        self.layout = layout

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.layout.root}"

    def forget(self) -> None:
        """List and read anew from now on."""
        for name in ("sizes", "manifests", "pointers", "complete", "_texts"):
            self.__dict__.pop(name, None)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every object about checkpoints, by key relative to `RunLayout.checkpoints`."""
        cut = len(self.layout.checkpoints) + 1
        return {found.key[cut:]: found.size for found in self.store.list(self.layout.checkpoints)}

    @cached_property
    def manifests(self) -> set[str]:
        """Names of file checkpoints, such as `latest`, that have a manifest. Keys of no known form are left out here and below."""
        names = {key.removesuffix(FILE_SUMS) for key in self.sizes if key.endswith(FILE_SUMS)}
        return set(filter(is_name, names))

    @cached_property
    def pointers(self) -> set[str]:
        """Names that lead to a target."""
        return set(filter(is_name, self.sizes))

    @cached_property
    def complete(self) -> set[str]:
        """Targets that have a manifest."""
        parts = [key.split("/") for key in self.sizes]
        return {part[1] for part in parts if len(part) == 3 and part[2] == SUMS and _owner("/".join(part))}

    def names(self) -> list[tuple[str, bool]]:
        """Return what counts: names, and whether each is that of a file checkpoint; targets that no name leads to come last."""
        pointed = {self._pointed(name) for name in self.pointers}
        return [
            *((name, True) for name in sorted(self.manifests)),
            *((name, False) for name in sorted(self.pointers)),
            *((name, False) for name in sorted(self.complete - pointed)),
        ]

    def describe(self, name: str, *, file: bool) -> Described:
        if file:
            manifest = self._manifest(manifest_key(name))
            if set(manifest.files) != {f"{name}{SUFFIX}"}:
                raise CheckpointDamaged(f"its manifest describes {', '.join(sorted(manifest.files))}")
            return Described(name, None, manifest)
        target = name if is_target(name) else self._pointed(name)
        if not target or target not in self.complete:
            raise CheckpointDamaged(f"it leads to {target or 'nothing'}, which has no manifest")
        manifest = self._manifest(manifest_key(target))
        if manifest.record.name != target:
            raise CheckpointDamaged(f"{target}/{SUMS} describes {manifest.record.name}")
        return Described(name, target, manifest)

    def problems(self, found: Described) -> list[str]:
        """Return which objects of a checkpoint are missing or have another size than was written; nothing of them is read."""
        told = []
        for name, (size, _) in sorted(found.manifest.files.items()):
            key = found.key(name)
            there = self.sizes.get(key)
            if there != size:
                told.append(f"{key} is missing" if there is None else f"{key} has {there} bytes instead of {size}")
        return told

    def chunks(self, found: Described, file: str) -> Iterator[memoryview]:
        """Yield the contents of a file of a checkpoint."""
        return self.store.chunks(f"{self.layout.checkpoints}/{found.key(file)}")

    def download(self, found: Described, file: str, writer: storage.HashingWriter) -> None:
        """Write a file of a checkpoint."""
        (size, digest), key = found.manifest.files[file], found.key(file)
        try:
            for piece in self.chunks(found, file):
                writer.write(piece)
        except RemoteMissing as error:
            raise CheckpointDamaged(f"{key} is missing") from error
        if writer.size != size:
            raise CheckpointDamaged(f"{key} has {writer.size} bytes instead of {size}")
        if writer.sha256 != digest:
            raise CheckpointDamaged(f"{key} has another SHA-256 than was written")

    def _pointed(self, name: str) -> str:
        target = (self._text(name) or "").strip()
        return target if is_target(target) else ""

    def _manifest(self, key: str) -> Manifest:
        text = self._text(key)
        if text is None:
            raise CheckpointDamaged(f"{key} is missing")
        try:
            return Manifest.parse(text)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{key}: {error}") from error

    def _text(self, key: str) -> str | None:
        if key not in self._texts:
            try:
                self._texts[key] = self.store.get(f"{self.layout.checkpoints}/{key}").decode("utf-8", "replace")
            except RemoteMissing:
                self._texts[key] = None
        return self._texts[key]

    @cached_property
    def _texts(self) -> dict[str, str | None]:
        return {}


@dataclass(frozen=True)
class Place:
    """What a URL means."""

    base: str
    layout: RunLayout
    name: str = "latest"
    file: bool | None = None


def place_of(url: str) -> Place:
    """Return what a URL of a run, of its checkpoints, or of one of them means; nothing is asked of the store."""
    check_url(url)
    scheme, _, rest = url.partition("://")
    rest = urlsplit(url).path if scheme == "file" else rest
    parts = [part for part in rest.split("/") if part]
    name, file = "latest", None
    if CHECKPOINTS in parts[2:]:
        cut = len(parts) - 1 - parts[::-1].index(CHECKPOINTS)
        below, parts = parts[cut + 1 :], parts[:cut]
        if below:
            name = below[-1].removesuffix(SUFFIX)
            file = below[-1].endswith(SUFFIX) or None
        if not (is_name(name) or is_target(name)) or len(below) > (2 if is_target(name) else 1):
            raise CheckpointNotFound(_NO_RUN.format(url))
    if len(parts) < 2 or (scheme != "file" and len(parts) < 3):
        raise CheckpointNotFound(_NO_RUN.format(url))
    *base, family, run = parts
    root = "/" if scheme == "file" else ""
    return Place(f"{scheme}://{root}{'/'.join(base)}", RunLayout(family, run), name, file)


_NO_RUN = (
    "Expected the URL of a run or of a checkpoint of it, such as s3://bucket/prefix/lineage/id or .../checkpoints/best. Received: {!r}. "
    "Give one of these."
)


def chosen(run: StoredRun, name: str, file: bool | None) -> Described:
    """Return the checkpoint that a name means."""
    kinds: Iterable[bool] = (True, False) if file is None else (file,)
    there = {True: run.manifests, False: run.pointers | run.complete}
    found = [run.describe(name, file=kind) for kind in kinds if name in there[kind]]
    if not found:
        names = ", ".join(sorted({name for name, _ in run.names()})) or "none"
        raise CheckpointNotFound(
            f"Expected a checkpoint named {name} in {run.url}. Received: none (there are: {names}). Give one that is there."
        )
    return max(found, key=lambda described: described.record.sequence)


class RemoteRun:
    """The checkpoints of one run in a store.

    It lists the objects once and tracks its own changes from then on: no other process writes. After an error it lists them anew,
    since a request whose answer was lost may have been carried out.
    """

    def __init__(self, store: RemoteStore, layout: RunLayout) -> None:
        self.store = store
        self.layout = layout
        self._keys: set[str] | None = None
        self._names: dict[str, tuple[Record, str]] = {}

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.layout.root}"

    def open(self) -> None:
        """List the objects and read the manifests."""
        stored = StoredRun(self.store, self.layout)
        names: dict[str, tuple[Record, str]] = {}
        for name, file in stored.names():
            with suppress(CheckpointDamaged):
                found = stored.describe(name, file=file)
                if found.target is None:
                    names[manifest_key(name)] = (found.record, found.manifest.files[f"{name}{SUFFIX}"][1])
                elif is_name(name):
                    names[name] = (found.record, found.target)
        self._keys, self._names = set(stored.sizes), names

    def forget(self) -> None:
        """List the objects again before the next request."""
        self._keys = None

    @property
    def keys(self) -> set[str]:
        """The objects, relative to the checkpoints' prefix."""
        if self._keys is None:
            self.open()
        assert self._keys is not None
        return self._keys

    @property
    def records(self) -> list[Record]:
        """What the names that count are, as their manifests record them."""
        assert self.keys is not None
        return [record for record, _ in self._names.values()]

    def put(self, key: str, content: bytes | Path) -> None:
        """Put an object of the checkpoints."""
        known = self.keys
        try:
            self.store.put(f"{self.layout.checkpoints}/{key}", content)
        except BaseException:
            self.forget()
            raise
        known.add(key)

    def commit_file(self, name: str, manifest: Manifest) -> None:
        """Make a file visible under a name."""
        self.put(manifest_key(name), manifest.text().encode())
        self._names[manifest_key(name)] = (manifest.record, manifest.files[f"{name}{SUFFIX}"][1])

    def commit_target(self, manifest: Manifest, target: str, names: Iterable[str]) -> None:
        """Make a target complete, and let names lead to it."""
        self.put(manifest_key(target), manifest.text().encode())
        for name in names:
            self.put(name, f"{target}\n".encode())
            self._names[name] = (replace(manifest.record, name=name), target)

    def retire(self, *, keep: int, up_to: int | None, spared: Collection[str]) -> None:
        """Remove the history that is given up, and then what no name leads to."""
        last = newest(self.records)
        if last is None:
            return
        of_line = [record for record in self.records if on_line(record, last.branch, last.line)]
        protected = {record.sequence for record in of_line if record.name in ("latest", "best")}
        for name in to_delete(of_line, keep=keep, protected=protected):
            self._remove_name(name)
        # Digests of file checkpoints and targets.
        kept = {*spared, *(content for _, content in self._names.values())}
        gone = [
            key for key in self.keys if (owner := _owner(key)) and owner not in kept and not _is_later(owner, up_to)
        ]
        # A target without its manifest does not count, whatever else is left when this is interrupted.
        self._remove(sorted(gone, key=lambda key: (not key.endswith(f"/{SUMS}"), key)))

    def _remove_name(self, name: str) -> None:
        for key in (manifest_key(name), name):
            if key in self._names:
                self._remove([key])
                del self._names[key]

    def _remove(self, keys: Collection[str]) -> None:
        for key in keys:
            self.store.delete(f"{self.layout.checkpoints}/{key}")
            self.keys.discard(key)


def _owner(key: str) -> str | None:
    """Return the digest or the target that an object is a part of; `None` for names and for keys of no known form."""
    head, _, rest = key.partition("/")
    owner, _, file = rest.partition("/")
    is_part = _DIGEST.fullmatch(rest) if head == OBJECTS else head == TARGETS and is_target(owner) and file
    return owner if is_part else None


def _is_later(owner: str, up_to: int | None) -> bool:
    """Whether a target was made after a save: other ranks may be ahead with theirs."""
    return up_to is not None and is_target(owner) and int(owner.partition("-")[0]) > up_to


def runs_of_id(store: RemoteStore, family: str, id: str) -> list[str]:
    """Return the names of the runs of an id that have a checkpoint or a file in a store; a lock alone is no run."""
    # Each name is asked for by itself, and a family may have many runs of others.
    named = [name for name in store.directories(family) if name == id or name.startswith(f"{id}-")]
    return [name for name in named if store.directories(f"{family}/{name}")]
