"""The checkpoints of one run in a store: what is there, what is recorded of it, and how it is brought here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple
from urllib.parse import urlsplit

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.checkpoints.manifest import Manifest, Record, is_name
from danling.checkpoints.store import SUFFIX, is_target

from .errors import RemoteMissing
from .layout import CHECKPOINTS, SUMS, Listed, RunLayout, listed
from .store import RemoteStore, check_url


class Described(NamedTuple):
    """A name in a store, with the manifest that it leads to.

    Attributes:
        name: `latest`, `best`, a history name, `model`, or the name of a target.
        target: The target that it leads to; `None` for a file checkpoint.
        manifest: What it consists of.
    """

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
    """What a URL means.

    Attributes:
        base: URL that runs lie below.
        layout: The run.
        name: Name of a checkpoint of it.
        file: Whether it is a file checkpoint; `None` where the URL does not say.
    """

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
