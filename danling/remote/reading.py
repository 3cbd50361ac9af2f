"""Runs and checkpoints below a URL, for the commands: what runs have logged is brought here, checkpoints are verified where they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from danling.checkpoints.directory import SUFFIX, TARGETS, is_target, misled
from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.utils.files import is_plain_path
from danling.workspace.runs import Run, find_runs

from .sources import bring_object
from .store import RemoteMissing, RemoteStore
from .stored_run import CHECKPOINTS, FILES, Described, StoredRun, chosen, place_of

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


def verify_stored(url: str, level: str, *, connect: Callable[[str], RemoteStore]) -> list[dict[str, Any]]:
    """Return a verdict for each checkpoint that a URL means: `path`, `problems`, a `note`, and `step` and `epoch` where known."""
    place = place_of(url)
    run = StoredRun(connect(place.base), place.layout)
    names = run.names()
    if not url.rstrip("/").endswith((f"/{place.layout.root}", f"/{CHECKPOINTS}")):
        found = chosen(run, place.name, place.file)
        names = [(found.name, found.target is None)]
    if not names:
        raise CheckpointNotFound(f"Expected a checkpoint at {url}. Received: none. Name the URL of a run.")
    # Several names may lead to the same contents, which are read once.
    read: dict[str, str | None] = {}
    return [_verdict(run, name, file, level, read) for name, file in names]


def _verdict(run: StoredRun, name: str, file: bool, level: str, read: dict[str, str | None]) -> dict[str, Any]:
    below = f"{TARGETS}/{name}" if is_target(name) else f"{name}{SUFFIX}" if file else name
    verdict: dict[str, Any] = {"path": f"{run.url}/{CHECKPOINTS}/{below}", "step": None, "epoch": None, "note": None}
    try:
        found = run.describe(name, file=file)
    except CheckpointDamaged as error:
        return {**verdict, "problems": [str(error)]}
    problems = run.problems(found)
    if not problems and level == "full":
        problems = [told for told in (_compared(run, found, each, read) for each in found.manifest.files) if told]
    record = found.record
    if found.target is not None:
        problems += misled(Path(name), record)
    return {**verdict, "step": record.step, "epoch": record.epoch, "problems": problems}


def _compared(run: StoredRun, found: Described, file: str, read: dict[str, str | None]) -> str | None:
    key = found.key(file)
    if key not in read:
        digest = hashlib.sha256()
        try:
            for piece in run.chunks(found, file):
                digest.update(piece)
            read[key] = digest.hexdigest()
        except RemoteMissing:
            read[key] = None
    if read[key] is None:
        return f"{key} is missing"
    return None if read[key] == found.manifest.files[file][1] else f"{key} has another SHA-256 than was written"
