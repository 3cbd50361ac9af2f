"""Runs of which a store has a copy: how they are configured, and what a mirror leaves of them, written by hand.

What reads such a run is tested against the layout alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danling.checkpoints.checkpoint_store import SUFFIX
from danling.checkpoints.file_store import FILE_SUMS
from danling.checkpoints.manifest import Manifest, is_name
from danling.checkpoints.target_store import SUMS, TARGETS
from danling.remote.store import RemoteStore
from danling.remote.stored_run import RunLayout


def copied(
    root: Path, url: str, *, checkpoint: Mapping[str, Any], **changes: Any
) -> dict[str, Any]:
    """Return the configuration of a `TracingRunner` of four updates that a store has a copy of."""
    return {
        "steps": 4,
        "seed": 3,
        "dataloader.batch_size": 2,
        "optim.type": "sgd",
        "auto_resume": True,
        "workspace_root": str(root),
        "checkpoint": {**checkpoint, "remote": {"url": url, "retries": 0}},
        **changes,
    }


def upload_run(
    directory: Path, store: RemoteStore, layout: RunLayout, *, checkpoints: str = "checkpoints"
) -> None:
    """Copy a run directory as it is now: contents first, then manifests, then pointers, then the other files."""
    place, below = directory / checkpoints, layout.checkpoints
    for sums in sorted(place.glob(f"*{SUFFIX}{FILE_SUMS}")):
        ((_, digest),) = Manifest.parse(sums.read_text()).files.values()
        store.put(f"{below}/objects/{digest}", place / sums.name.removesuffix(FILE_SUMS))
        store.put(f"{below}/{sums.name}", sums)
    for target in sorted((place / TARGETS).glob("*")):
        for file in sorted(target.iterdir(), key=lambda path: path.name == SUMS):
            store.put(f"{below}/{TARGETS}/{target.name}/{file.name}", file)
    for pointer in sorted(place.iterdir()):
        if is_name(pointer.name) and pointer.is_file():
            store.put(f"{below}/{pointer.name}", pointer)
    for file in sorted(directory.rglob("*")):
        if file.is_file() and place not in file.parents and not file.name.startswith("."):
            store.put(layout.file(str(file.relative_to(directory))), file)
