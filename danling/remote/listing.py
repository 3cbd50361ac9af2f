"""Runs below a URL, for those who look at them: what they have logged is brought here, their checkpoints stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from danling.utils.files import is_plain_path
from danling.workspace.runs import Run, find_runs

from .layout import CHECKPOINTS, FILES
from .store import RemoteStore
from .stored_files import bring_object

_DEPTH = 5
_READ = ("metrics.jsonl", "results.json", "latest.json", "best.json", "streams.json", "digests.jsonl")
_DIRECTORIES = ("metadata",)
_COUNTED = "logs"


def runs_below(store: RemoteStore, directory: Path) -> list[Run]:
    """Return the runs at or below the URL of a store, sorted by name."""
    roots = [root for root in _runs(store, "", _DEPTH) if not root or is_plain_path(root)]
    for root in roots:
        _bring(store, root, directory / root)
    if not roots:
        raise FileNotFoundError(f"Expected runs below {store.url!r}. Received: none. Name another URL.")
    found = find_runs(directory)
    last = store.url.rpartition("/")[2]
    return [
        replace(
            run,
            place=store.url if roots == [""] else f"{store.url}/{run.name}",
            name=last if roots == [""] else run.name,
        )
        for run in found
    ]


def _runs(store: RemoteStore, prefix: str, depth: int) -> Iterator[str]:
    names = store.directories(prefix)
    if FILES in names or CHECKPOINTS in names:
        yield prefix
    elif depth:
        for name in names:
            yield from _runs(store, f"{prefix}/{name}" if prefix else name, depth - 1)


def _bring(store: RemoteStore, root: str, directory: Path) -> None:
    prefix = f"{root}/{FILES}" if root else FILES
    for found in store.list(prefix):
        name = found.key[len(prefix) + 1 :]
        head, _, rest = name.partition("/")
        if not is_plain_path(name):
            continue
        if name in _READ or (head in _DIRECTORIES and rest):
            bring_object(store, found, name, directory)
        elif head == _COUNTED and rest and "/" not in rest:
            # Logs are counted, and not read.
            (directory / head).mkdir(parents=True, exist_ok=True)
            (directory / head / rest).touch()
