"""Compare checkpoints with the SHA-256 checksums that were written with them, and name every file that differs.

A file, pointer or target is verified alone; a checkpoint or run directory means all that is in it, checksums whose file is gone
included. A file that was copied without its checksums is compared with those inside of it. What a killed process of the run has left is
named as litter: it is no damage, and the next start removes it. Nothing is loaded, and torch is not needed. Exit code 1 says that
something is damaged.

Example: danling verify experiments/digits/e3551df201ca5a2c
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from danling.checkpoints import storage
from danling.checkpoints.checkpoint_store import SUFFIX, CheckpointStore
from danling.checkpoints.directory import advice_about, stores_in
from danling.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
)
from danling.checkpoints.file_store import FILE_SUMS, FileStore, has_sums, is_of_run, verify_alone
from danling.checkpoints.manifest import is_legacy, is_name
from danling.checkpoints.target_store import SUMS, TARGETS, TargetStore
from danling.utils.messages import as_text
from danling.workspace.run_directory import is_in_use
from danling.workspace.workspace import litter_in_run

from .output import DAMAGED, OK, add_json, print_json
from .source import is_url


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "checkpoint", help="a checkpoint, or a checkpoint or run directory; or its URL"
    )
    parser.add_argument(
        "--level",
        choices=("full", "size"),
        default="full",
        help="checksums and sizes, or sizes only",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print one line for each checkpoint and one for each problem."""
    litter: list[Path] = []
    if is_url(options.checkpoint):
        # Only a user with a store needs this.
        from danling.remote.sources import stored_checkpoints

        store, paths = stored_checkpoints(options.checkpoint)
        verdicts = [_verdict(path, options.level, store) for path in paths]
    else:
        path = Path(options.checkpoint)
        litter = litter_of(path)
        # Of some checkpoints a deletion that was killed has left the checksums alone.
        verdicts = [
            found
            for found in verify(path, options.level)
            if Path(found["path"] + FILE_SUMS) not in litter
        ]
    damaged = [verdict for verdict in verdicts if verdict["problems"]]
    if options.json:
        print_json(
            {"level": options.level, "checkpoints": verdicts, "litter": list(map(str, litter))}
        )
    else:
        for verdict in verdicts:
            problems = verdict["problems"]
            at = f"  step {verdict['step']}, epoch {verdict['epoch']}"
            about = "" if verdict["step"] is None else at
            print(f"{'DAMAGED' if problems else 'ok':8}{as_text(verdict['path'])}{about}")
            # A note only says how a file was compared, which no longer counts once it is damaged.
            notes = [verdict["note"]] if verdict["note"] else []
            for text in problems or notes:
                print(f"        {as_text(text)}")
        for left in litter:
            print(f"{'litter':8}{as_text(left)}")
        if damaged:
            print(f"{len(damaged)} of {len(verdicts)} damaged")
    return DAMAGED if damaged else OK


def litter_of(path: Path) -> list[Path]:
    """Return what killed processes of the run have left in a run or checkpoint directory; none while a process writes there."""
    if not path.is_dir() or (path / SUMS).is_file():
        return []
    run = path if (path / "metadata").is_dir() or (path / "checkpoints").is_dir() else path.parent
    if is_in_use(run):
        return []
    stores = [store for directory in (path, run / "checkpoints") for store in stores_in(directory)]
    litter = sorted({left for store in stores for left in store.litter()})
    return litter + litter_in_run(run) if run == path else litter


def verify(path: Path, level: str) -> list[dict[str, Any]]:
    """Return a verdict for each checkpoint that a path means: `path`, `problems`, a `note`, and `step` and `epoch` where known."""
    if path.is_file() and path.suffix != SUFFIX and not is_name(path.name):
        raise CheckpointNotFound(
            f"Expected a checkpoint of this library: {SUFFIX} files, names such as latest, or targets. Received: {str(path)!r}, which has "
            "no checksums to compare with. `danling inspect` shows weights of other programs."
        )
    verdicts = [_verdict(found, level) for found in checkpoints_of(path)]
    if not verdicts:
        raise CheckpointNotFound(
            f"Expected a checkpoint, or a directory with some. Received: {str(path)!r}, where there is none.{advice_about(path)}"
        )
    return verdicts


def checkpoints_of(path: Path) -> Iterator[Path]:
    """Yield every checkpoint that a path means, those of which only the checksums are left included."""
    sums = path.with_name(path.name + FILE_SUMS)
    if path.is_file() or storage.size_of(sums) is not None or (path / SUMS).is_file():
        yield path
        return
    for directory in (path, path / "checkpoints"):
        if directory.is_dir():
            yield from FileStore(directory).listed()
        if (directory / TARGETS).is_dir():
            yield from TargetStore(directory).listed()


def _verdict(path: Path, level: str, remote: CheckpointStore | None = None) -> dict[str, Any]:
    store = remote or (
        FileStore(path.parent) if path.suffix == SUFFIX else TargetStore(path.parent)
    )
    found: dict[str, Any] = {
        "path": store.shown(path),
        "step": None,
        "epoch": None,
        "problems": [],
        "note": None,
    }
    try:
        is_copy = remote is None and path.suffix == SUFFIX and path.is_file()
        if is_copy and not has_sums(path) and not is_of_run(path.parent):
            found |= _facts_of_a_copy(path, level)
        else:
            manifest, found["problems"] = store.examine(path, level)
            found |= {"step": manifest.record.step, "epoch": manifest.record.epoch}
    except (CheckpointDamaged, OSError) as error:
        found["problems"] = [str(error)]
    return found


def _facts_of_a_copy(path: Path, level: str) -> dict[str, object]:
    """Return the facts about a file that was copied without its checksums, which those inside of it verify."""
    if is_legacy(path):
        return {
            "note": "a file of torch.save before 1.6, which has no checksums: there is nothing to compare it with"
        }
    note = (
        f"{path.name}{FILE_SUMS} is missing: compared with the CRC-32 checksums inside of the file"
    )
    try:
        verify_alone(path, level)
        # torch is needed to say more: a manifest says which checkpoint a file is, otherwise only torch can read it.
        from danling.checkpoints.reading import read_payload

        facts = read_payload(path, sections=["state"], mmap=True).get("state", {}).get("train", {})
    except CheckpointMismatch:
        return {"note": f"{note}; it is no checkpoint of this library"}
    except CheckpointError as error:
        return {"note": note, "problems": [str(error)]}
    return {"note": note, "step": facts.get("global_step"), "epoch": facts.get("epoch")}
