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
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from danling.checkpoints import storage
from danling.checkpoints.checkpoint_store import SUFFIX
from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.checkpoints.file_store import FILE_SUMS
from danling.checkpoints.manifest import Manifest, Record, is_name, to_delete
from danling.checkpoints.target_store import SUMS, TARGETS, is_target

from .store import RemoteMissing, RemoteStore, check_url

CHECKPOINTS = "checkpoints"
FILES = "files"
LOCK = "lock"
OBJECTS = "objects"
RUN_FILES = (
    "metrics.jsonl",
    "results.json",
    "latest.json",
    "best.json",
    "progress.json",
    "streams.json",
    "digests.jsonl",
)
"""The files of a run that are neither checkpoints nor in one of its directories."""

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


# Keys about checkpoints are relative to `RunLayout.checkpoints`. An entry is a checkpoint as it is called in a directory: the file
# `latest.pth`, the pointer `latest`, or a target.


def target_key(target: str, file: str) -> str:
    return f"{TARGETS}/{target}/{file}"


def visible_key(entry: str) -> str:
    """Return the key of the object that makes an entry count: a manifest, or the pointer itself."""
    if is_target(entry):
        return target_key(entry, SUMS)
    return f"{entry}{FILE_SUMS}" if entry.endswith(SUFFIX) else entry


class Described(NamedTuple):
    """An entry, with the manifest that it leads to."""

    entry: str
    target: str | None
    manifest: Manifest

    @property
    def record(self) -> Record:
        """Its record, under its own name."""
        return replace(self.manifest.record, name=self.entry.removesuffix(SUFFIX))

    @property
    def content(self) -> str:
        """The target, or the digest of the file: names of equal content share it."""
        return self.target or self.manifest.files[self.entry][1]

    def key(self, file: str) -> str:
        """Return the key of one of its files."""
        return f"{OBJECTS}/{self.content}" if self.target is None else target_key(self.target, file)


class StoredRun:
    """The checkpoints of a run in a store. What was listed and read is remembered until `forget`, and so are changes made here."""

    def __init__(self, store: RemoteStore, layout: RunLayout) -> None:
        self.store = store
        self.layout = layout
        self.url = f"{store.url}/{layout.root}"
        self._texts: dict[str, str | None] = {}
        self._manifests: dict[str, Manifest] = {}

    def forget(self) -> None:
        """List and read anew from now on."""
        # The value of the cached property.
        self.__dict__.pop("sizes", None)
        self._texts, self._manifests = {}, {}

    # Reading

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every object about checkpoints, by key."""
        cut = len(self.layout.checkpoints) + 1
        return {found.key[cut:]: found.size for found in self.store.list(self.layout.checkpoints)}

    def entries(self) -> list[str]:
        """Return what counts: files, pointers, and targets that no pointer leads to. Keys of no known form are left out."""
        files = {
            key.removesuffix(FILE_SUMS)
            for key in self.sizes
            if key.endswith(f"{SUFFIX}{FILE_SUMS}")
        }
        files = {file for file in files if is_name(file.removesuffix(SUFFIX))}
        pointers = set(filter(is_name, self.sizes))
        owners = {
            owner for key in self.sizes if (owner := owner_of(key)) and key == visible_key(owner)
        }
        nameless = owners - {self._pointed(name) for name in pointers}
        return [*sorted(files), *sorted(pointers), *sorted(nameless)]

    def has(self, entry: str) -> bool:
        return visible_key(entry) in self.sizes

    def describe(self, entry: str) -> Described:
        if entry.endswith(SUFFIX):
            manifest = self._manifest(visible_key(entry))
            if set(manifest.files) != {entry}:
                raise CheckpointDamaged(
                    f"its manifest describes {', '.join(sorted(manifest.files))}"
                )
            return Described(entry, None, manifest)
        target = entry if is_target(entry) else self._pointed(entry)
        if not target or not self.has(target):
            raise CheckpointDamaged(f"it leads to {target or 'nothing'}, which has no manifest")
        manifest = self._manifest(visible_key(target))
        if manifest.record.name != target:
            raise CheckpointDamaged(f"{target}/{SUMS} describes {manifest.record.name}")
        return Described(entry, target, manifest)

    def named(self) -> list[Described]:
        """Return the files and pointers that lead to a whole manifest."""
        found = []
        for entry in self.entries():
            if not is_target(entry):
                with suppress(CheckpointDamaged):
                    found.append(self.describe(entry))
        return found

    def choose(self, wanted: str) -> Described:
        """Return the newest checkpoint that a name means: a file with its suffix or without, a pointer or a target."""
        kinds = [wanted] if wanted.endswith(SUFFIX) else [wanted, f"{wanted}{SUFFIX}"]
        found = [self.describe(entry) for entry in kinds if self.has(entry)]
        if not found:
            there = (
                ", ".join(sorted({entry.removesuffix(SUFFIX) for entry in self.entries()}))
                or "none"
            )
            raise CheckpointNotFound(
                f"Expected a checkpoint named {wanted} in {self.url}. Received: none (there are: {there}). Give one that is there."
            )
        return max(found, key=lambda described: described.record.sequence)

    def problems(self, found: Described) -> list[str]:
        """Return which objects of a checkpoint are missing or have another size than was written; nothing of them is read."""
        problems = []
        for name, (size, _) in sorted(found.manifest.files.items()):
            key = found.key(name)
            there = self.sizes.get(key)
            if there is None:
                problems.append(f"{key} is missing")
            elif there != size:
                problems.append(f"{key} has {there} bytes instead of {size}")
        return problems

    def chunks(self, found: Described, file: str) -> Iterator[memoryview]:
        """Yield the contents of a file of a checkpoint."""
        key = found.key(file)
        try:
            yield from self.store.chunks(f"{self.layout.checkpoints}/{key}")
        except RemoteMissing as error:
            raise CheckpointDamaged(f"{key} is missing") from error

    def download(self, found: Described, file: str, writer: storage.HashingWriter) -> None:
        """Write a file of a checkpoint."""
        (size, digest), key = found.manifest.files[file], found.key(file)
        for piece in self.chunks(found, file):
            writer.write(piece)
        # The size first: it tells a cut file from a changed one.
        if writer.size != size:
            raise CheckpointDamaged(f"{key} has {writer.size} bytes instead of {size}")
        if writer.sha256 != digest:
            raise CheckpointDamaged(f"{key} has another SHA-256 than was written")

    def _pointed(self, name: str) -> str:
        target = (self._text(name) or "").strip()
        return target if is_target(target) else ""

    def _manifest(self, key: str) -> Manifest:
        if key not in self._manifests:
            text = self._text(key)
            if text is None:
                raise CheckpointDamaged(f"{key} is missing")
            try:
                self._manifests[key] = Manifest.parse(text)
                del self._texts[key]  # long, for a checkpoint of many ranks
            except CheckpointDamaged as error:
                raise CheckpointDamaged(f"{key}: {error}") from error
        return self._manifests[key]

    def _text(self, key: str) -> str | None:
        if key not in self._texts:
            try:
                self._texts[key] = self.store.get(f"{self.layout.checkpoints}/{key}").decode(
                    "utf-8", "replace"
                )
            except RemoteMissing:
                self._texts[key] = None
        return self._texts[key]

    # Writing, by one process. After an error it lists anew, since a request whose answer was lost may have been carried out.

    def put(self, key: str, content: str | Path) -> None:
        """Put an object of the checkpoints: a small text, or a file."""
        raw = content.encode() if isinstance(content, str) else content
        # Before the put: a listing that follows would have the object already.
        sizes = self.sizes
        try:
            self.store.put(f"{self.layout.checkpoints}/{key}", raw)
        except BaseException:
            self.forget()
            raise
        sizes[key] = len(raw) if isinstance(raw, bytes) else raw.stat().st_size
        if isinstance(content, str):
            self._texts[key] = content
            self._manifests.pop(key, None)

    def retire(self, *, keep: int, up_to: int | None, spared: Collection[str | None]) -> None:
        """Remove the history that is given up, and then what no name leads to."""
        # In a run without any name, all objects may be those of the first save, which is coming.
        named = self.named()
        records = [found.record for found in named]
        if not records:
            return
        protected = {record.sequence for record in records if record.name in ("latest", "best")}
        given_up = to_delete(records, keep=keep, protected=protected)
        self._remove([visible_key(found.entry) for found in named if found.record.name in given_up])
        kept = {*spared, *(found.content for found in named if found.record.name not in given_up)}
        gone = [
            key
            for key in self.sizes
            if (owner := owner_of(key)) and owner not in kept and not _is_later(owner, up_to)
        ]
        # A target without its manifest does not count, whatever else is left when this is interrupted.
        self._remove(sorted(gone, key=lambda key: (not key.endswith(f"/{SUMS}"), key)))

    def _remove(self, keys: Collection[str]) -> None:
        for key in keys:
            self.store.delete(f"{self.layout.checkpoints}/{key}")
            del self.sizes[key]
            self._manifests.pop(key, None)


def owner_of(key: str) -> str | None:
    """Return the digest or the target that an object is a part of; `None` for names and for keys of no known form."""
    head, _, rest = key.partition("/")
    owner, _, file = rest.partition("/")
    is_object = head == OBJECTS and _DIGEST.fullmatch(rest)
    is_part = head == TARGETS and is_target(owner) and file
    return owner if is_object or is_part else None


def _is_later(owner: str, up_to: int | None) -> bool:
    """Whether a target was made after a save: other ranks may be ahead with theirs."""
    return up_to is not None and is_target(owner) and int(owner.partition("-")[0]) > up_to


@dataclass(frozen=True)
class Place:
    """What a URL means: a run, and the checkpoint of it that is named; `None` for the run itself."""

    base: str
    layout: RunLayout
    wanted: str | None


def place_of(url: str) -> Place:
    """Return what a URL of a run, of its checkpoints, or of one of them means; nothing is asked of the store."""
    check_url(url)
    scheme, _, rest = url.partition("://")
    rest = urlsplit(url).path if scheme == "file" else rest
    parts = [part for part in rest.split("/") if part]
    below: list[str] = []
    # The last one: a bucket or a lineage may be called so too.
    if CHECKPOINTS in parts[2:]:
        cut = len(parts) - 1 - parts[::-1].index(CHECKPOINTS)
        below, parts = parts[cut + 1 :], parts[:cut]
    wanted = below[-1] if below else None
    is_known = wanted is None or is_name(wanted.removesuffix(SUFFIX)) or is_target(wanted)
    is_deep = len(below) > (2 if wanted is not None and is_target(wanted) else 1)
    if not is_known or is_deep or len(parts) < (2 if scheme == "file" else 3):
        raise CheckpointNotFound(
            "Expected the URL of a run or of a checkpoint of it, such as s3://bucket/prefix/lineage/id or .../checkpoints/best. Received: "
            f"{url!r}. Give one of these."
        )
    *base, family, run = parts
    root = "/" if scheme == "file" else ""
    return Place(f"{scheme}://{root}{'/'.join(base)}", RunLayout(family, run), wanted)


def runs_of_id(store: RemoteStore, family: str, id: str) -> list[str]:
    """Return the names of the runs of an id that have a checkpoint or a file in a store; a lock alone is no run."""
    # Each name is asked for by itself, and a family may have many runs of others.
    named = [name for name in store.directories(family) if name == id or name.startswith(f"{id}-")]
    return [name for name in named if store.directories(f"{family}/{name}")]
