"""A run in a store: where its objects are, which of them count, how they are read, and how its one writer makes, moves and removes names.

Below `url/lineage[-code_id]/id/` lies what the run directory has, under the names that it has there:

    lock                                         who writes, see `danling.remote.lease`
    checkpoints/objects/<sha256>                 contents of file checkpoints; equal contents lie there once
    checkpoints/<name>.pth.sha256                the manifest of a file checkpoint: its digest names the object
    checkpoints/targets/<target>/<file>          files of a sharded checkpoint, as they lie in the run directory
    checkpoints/targets/<target>/manifest.sha256 the manifest of a sharded checkpoint
    checkpoints/<name>                           the name of the target that `latest`, `best`, ... lead to
    files/<path>                                 the run's other files, below the path that they have in the run directory

What is visible when: a file checkpoint counts under a name when the manifest of that name is there. It is put after the object that it
names, and the one of `latest` is put last, as on the disk. A target counts when its manifest is there; it is put after all other files of
the target, and before the pointers. Every one of these puts is atomic, so that nothing that counts is ever incomplete.
What is removed goes in the reverse order: pointer or manifest first, contents last. An object that no manifest names, and files of a target
without a manifest, are what a killed upload leaves; the next writer removes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.checkpoints.manifest import Manifest, Record, is_name, newest, on_line, to_delete
from danling.checkpoints.store import FILE_SUMS as SUMS_OF_FILE
from danling.checkpoints.store import SUFFIX, SUMS, TARGETS, is_target

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
        """Key of the lock."""
        return f"{self.root}/{LOCK}"

    @property
    def checkpoints(self) -> str:
        """Prefix of everything about checkpoints, without a slash at its end."""
        return f"{self.root}/{CHECKPOINTS}"

    @property
    def files(self) -> str:
        """Prefix of the run's other files, without a slash at its end."""
        return f"{self.root}/{FILES}"

    def object(self, digest: str) -> str:
        """Return the key of the contents of a file checkpoint with this SHA-256."""
        return f"{self.checkpoints}/{OBJECTS}/{digest}"

    def manifest(self, name: str) -> str:
        """Return the key of the manifest of a file checkpoint, such as `latest`."""
        return f"{self.checkpoints}/{name}{FILE_SUMS}"

    def target_file(self, target: str, file: str) -> str:
        """Return the key of a file of a target."""
        return f"{self.checkpoints}/{TARGETS}/{target}/{file}"

    def target_manifest(self, target: str) -> str:
        """Return the key of the manifest of a target."""
        return self.target_file(target, SUMS)

    def pointer(self, name: str) -> str:
        """Return the key of a pointer to a target, such as `latest`."""
        return f"{self.checkpoints}/{name}"

    def file(self, path: str) -> str:
        """Return the key of another file of the run, by its path relative to the run directory."""
        return f"{self.files}/{path}"


@dataclass(frozen=True)
class Listed:
    """What the keys of a run's checkpoints say, before anything is read."""

    manifests: frozenset[str]
    objects: frozenset[str]
    pointers: frozenset[str]
    complete: frozenset[str]
    parts: Mapping[str, frozenset[str]]


def listed(keys: Iterable[str]) -> Listed:
    """Tell what lies below the prefix of a run's checkpoints. Keys of no known form are nobody's, and left out."""
    manifests, objects, pointers, complete = set(), set(), set(), set()
    parts: dict[str, set[str]] = {}
    for key in keys:
        head, _, rest = key.partition("/")
        if not rest:
            if key.endswith(FILE_SUMS) and is_name(key.removesuffix(FILE_SUMS)):
                manifests.add(key.removesuffix(FILE_SUMS))
            elif is_name(key):
                pointers.add(key)
        elif head == OBJECTS and _DIGEST.fullmatch(rest):
            objects.add(rest)
        elif head == TARGETS:
            target, _, file = rest.partition("/")
            if is_target(target) and file:
                parts.setdefault(target, set()).add(key)
                if file == SUMS:
                    complete.add(target)
    sets = {target: frozenset(keys) for target, keys in parts.items()}
    return Listed(frozenset(manifests), frozenset(objects), frozenset(pointers), frozenset(complete), sets)


def unreferenced(
    found: Listed, *, digests: Collection[str], targets: Collection[str], spared: Collection[str] = ()
) -> list[str]:
    """Return the keys that no name leads to, in the order in which they are to be removed: manifests before contents."""
    gone = [f"{OBJECTS}/{digest}" for digest in sorted(found.objects - {*digests, *spared})]
    for target in sorted(found.parts.keys() - {*targets, *spared}):
        manifest = f"{TARGETS}/{target}/{SUMS}"
        rest = sorted(found.parts[target] - {manifest})
        gone += [manifest, *rest] if target in found.complete else rest
    return gone


class Described(NamedTuple):
    """A name in a store, with the manifest that it leads to."""

    name: str
    target: str | None
    manifest: Manifest

    @property
    def record(self) -> Record:
        """What is recorded of it, under this name."""
        return replace(self.manifest.record, name=self.name)

    @property
    def shown(self) -> str:
        """What it is called in a listing: as its file or pointer in a run directory."""
        return f"{self.name}{SUFFIX}" if self.target is None else self.name


class StoredRun:
    """The checkpoints of a run in a store. What was listed and read of it is remembered until `forget`."""

    def __init__(self, store: RemoteStore, layout: RunLayout) -> None:
        self.store = store
        self.layout = layout

    @property
    def url(self) -> str:
        """The URL of the run."""
        return f"{self.store.url}/{self.layout.root}"

    def forget(self) -> None:
        """List and read anew from now on."""
        for name in ("sizes", "listed", "_manifests"):
            self.__dict__.pop(name, None)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every object about checkpoints, by key relative to `RunLayout.checkpoints`."""
        cut = len(self.layout.checkpoints) + 1
        return {found.key[cut:]: found.size for found in self.store.list(self.layout.checkpoints)}

    @cached_property
    def listed(self) -> Listed:
        """What these keys say."""
        return listed(self.sizes)

    def names(self) -> list[tuple[str, bool]]:
        """Return what counts: names, and whether each is that of a file checkpoint; targets that no name leads to come last."""
        found = self.listed
        pointed = {self._pointed(name) for name in found.pointers}
        return [
            *((name, True) for name in sorted(found.manifests)),
            *((name, False) for name in sorted(found.pointers)),
            *((name, False) for name in sorted(found.complete - pointed)),
        ]

    def describe(self, name: str, *, file: bool) -> Described:
        """Return what a name leads to."""
        if file:
            manifest = self._manifest(self.layout.manifest(name))
            if set(manifest.files) != {f"{name}{SUFFIX}"}:
                raise CheckpointDamaged(f"its manifest describes {', '.join(sorted(manifest.files))}")
            return Described(name, None, manifest)
        target = name if is_target(name) else self._pointed(name)
        if not target or target not in self.listed.complete:
            raise CheckpointDamaged(f"it leads to {target or 'nothing'}, which has no manifest")
        manifest = self._manifest(self.layout.target_manifest(target))
        if manifest.record.name != target:
            raise CheckpointDamaged(f"{target}/{SUMS} describes {manifest.record.name}")
        return Described(name, target, manifest)

    def problems(self, found: Described) -> list[str]:
        """Return which objects of a checkpoint are missing or have another size than was written; nothing of them is read."""
        keys = {name: self.key(found, name) for name in found.manifest.files}
        told = []
        for name, (size, _) in sorted(found.manifest.files.items()):
            there = self.sizes.get(keys[name])
            if there is None:
                told.append(f"{keys[name]} is missing")
            elif there != size:
                told.append(f"{keys[name]} has {there} bytes instead of {size}")
        return told

    def key(self, found: Described, file: str) -> str:
        """Return the key of a file of a checkpoint, relative to `RunLayout.checkpoints`."""
        size_and_digest = found.manifest.files[file]
        whole = self.layout.object(size_and_digest[1]) if found.target is None else self.file_key(found.target, file)
        return whole[len(self.layout.checkpoints) + 1 :]

    def file_key(self, target: str, file: str) -> str:
        """Return the key of a file of a target."""
        return self.layout.target_file(target, file)

    def chunks(self, found: Described, file: str) -> Iterator[memoryview]:
        """Yield the contents of a file of a checkpoint."""
        return self.store.chunks(f"{self.layout.checkpoints}/{self.key(found, file)}")

    def download(self, found: Described, file: str, writer: storage.HashingWriter) -> None:
        """Write a file of a checkpoint."""
        size, digest = found.manifest.files[file]
        try:
            for piece in self.chunks(found, file):
                writer.write(piece)
        except RemoteMissing as error:
            raise CheckpointDamaged(f"{self.key(found, file)} is missing") from error
        if writer.size != size:
            raise CheckpointDamaged(f"{self.key(found, file)} has {writer.size} bytes instead of {size}")
        if writer.sha256 != digest:
            raise CheckpointDamaged(f"{self.key(found, file)} has another SHA-256 than was written")

    def _pointed(self, name: str) -> str:
        key = self.layout.pointer(name)
        if key not in self._manifests:
            try:
                self._manifests[key] = self.store.get(key).decode("ascii", "replace").strip()
            except RemoteMissing:
                self._manifests[key] = ""
        target = self._manifests[key]
        return target if is_target(target) else ""

    def _manifest(self, key: str) -> Manifest:
        if key not in self._manifests:
            try:
                self._manifests[key] = self.store.get(key).decode("utf-8", "replace")
            except RemoteMissing as error:
                raise CheckpointDamaged(f"{key} is missing") from error
        try:
            return Manifest.parse(self._manifests[key])
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{key}: {error}") from error

    @cached_property
    def _manifests(self) -> dict[str, str]:
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
    there = {True: run.listed.manifests, False: run.listed.pointers | run.listed.complete}
    found = [run.describe(name, file=kind) for kind in kinds if name in there[kind]]
    if not found:
        names = ", ".join(sorted({name for name, _ in run.names()})) or "none"
        raise CheckpointNotFound(
            f"Expected a checkpoint named {name} in {run.url}. Received: none (there are: {names}). Give one that is there."
        )
    return max(found, key=lambda described: described.record.sequence)


class RemoteRun:
    """The checkpoints of one run in a store.

    What is there is listed once, and followed from then on: this process is the only one that writes. After an error it is listed anew,
    since a request whose answer was lost may have been carried out.
    """

    def __init__(self, store: RemoteStore, layout: RunLayout) -> None:
        self.store = store
        self.layout = layout
        self._keys: set[str] | None = None
        self._names: dict[str, tuple[Record, str]] = {}

    @property
    def url(self) -> str:
        """Where the run lies."""
        return f"{self.store.url}/{self.layout.root}"

    def open(self) -> None:
        """List what is there and read the manifests."""
        stored = StoredRun(self.store, self.layout)
        names: dict[str, tuple[Record, str]] = {}
        for name, file in stored.names():
            with suppress(CheckpointDamaged):
                found = stored.describe(name, file=file)
                if found.target is None:
                    names[f"{name}{FILE_SUMS}"] = (found.record, found.manifest.files[f"{name}{SUFFIX}"][1])
                elif is_name(name):
                    names[name] = (found.record, found.target)
        self._keys, self._names = set(stored.sizes), names

    def forget(self) -> None:
        """List what is there anew before it is asked for the next time."""
        self._keys = None

    @property
    def keys(self) -> set[str]:
        """What is there, relative to the checkpoints' prefix."""
        if self._keys is None:
            self.open()
        assert self._keys is not None
        return self._keys

    @property
    def records(self) -> list[Record]:
        """What the names that count are, as their manifests record them."""
        assert self.keys is not None
        return [record for record, _ in self._names.values()]

    def has(self, key: str) -> bool:
        """Whether an object of the checkpoints is there."""
        return self._short(key) in self.keys

    def note(self, *keys: str) -> None:
        """Know of objects that other ranks have put."""
        self.keys.update(self._short(key) for key in keys)

    def put(self, key: str, content: bytes | Path) -> None:
        """Put an object of the checkpoints."""
        known = self.keys
        try:
            self.store.put(key, content)
        except BaseException:
            self.forget()
            raise
        known.add(self._short(key))

    def commit_file(self, name: str, manifest: Manifest) -> None:
        """Make a file visible under a name."""
        self.put(self.layout.manifest(name), manifest.text().encode())
        self._names[f"{name}{FILE_SUMS}"] = (manifest.record, manifest.files[f"{name}{SUFFIX}"][1])

    def commit_target(self, manifest: Manifest, target: str) -> None:
        """Make a target complete."""
        self.put(self.layout.target_manifest(target), manifest.text().encode())

    def point(self, name: str, target: str, record: Record) -> None:
        """Let a name lead to a complete target."""
        self.put(self.layout.pointer(name), f"{target}\n".encode())
        self._names[name] = (replace(record, name=name), target)

    def retire(self, *, keep: int, up_to: int | None, spared: Collection[str]) -> None:
        """Remove the history that is given up, and then what no name leads to."""
        last = newest(self.records)
        if last is None:
            return
        of_line = [record for record in self.records if on_line(record, last.branch, last.line)]
        protected = {record.sequence for record in of_line if record.name in ("latest", "best")}
        for name in to_delete(of_line, keep=keep, protected=protected):
            self._remove_name(name)
        found = listed(self.keys)
        contents = {content for _, content in self._names.values()}
        if up_to is not None:
            spared = {*spared, *(target for target in found.parts if int(target.partition("-")[0]) > up_to)}
        gone = unreferenced(found, digests=contents, targets=contents, spared=spared)
        self._remove([f"{self.layout.checkpoints}/{key}" for key in gone])

    def _remove_name(self, name: str) -> None:
        for short in (f"{name}{FILE_SUMS}", name):
            if short in self._names:
                self._remove([f"{self.layout.checkpoints}/{short}"])
                del self._names[short]

    def _remove(self, keys: Collection[str]) -> None:
        for key in keys:
            self.store.delete(key)
            self.keys.discard(self._short(key))

    def _short(self, key: str) -> str:
        return key.removeprefix(f"{self.layout.checkpoints}/")


def runs_of_id(store: RemoteStore, family: str, id: str) -> list[str]:
    """Return the names of the runs of an id that have a checkpoint or a file in a store; a lock alone is no run."""
    # Each name is asked for by itself, and a family may have many runs of others.
    named = [name for name in store.directories(family) if name == id or name.startswith(f"{id}-")]
    return [name for name in named if store.directories(f"{family}/{name}")]
