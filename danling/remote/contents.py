"""What a store has of a run, as its one writer knows it, and how names there are made, moved and removed."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from danling.checkpoints.errors import CheckpointDamaged
from danling.checkpoints.manifest import Manifest, Record, is_name, newest, on_line, to_delete
from danling.checkpoints.store import SUFFIX

from .layout import FILE_SUMS, RunLayout, listed, unreferenced
from .store import RemoteStore
from .stored_run import StoredRun


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
