"""Compares checkpoints in a store with their SHA-256, without keeping anything here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from danling.checkpoints.errors import CheckpointDamaged, CheckpointNotFound
from danling.checkpoints.store import SUFFIX, is_target, misled

from .errors import RemoteMissing
from .layout import CHECKPOINTS, TARGETS
from .store import RemoteStore
from .stored_run import Described, StoredRun, chosen, place_of


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
    key = run.key(found, file)
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
