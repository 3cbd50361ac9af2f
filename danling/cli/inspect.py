"""Show the content of a checkpoint without loading its tensors.

Checkpoints of this library (files and sharded ones), files of torch.save and safetensors are read. Use --tensors for a line
a tensor, --config for the settings it was made with.

Example: danling inspect experiments/digits/e3551df201ca5a2c --config
"""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danling.checkpoints.errors import CheckpointDamaged
from danling.checkpoints.reading import Entry, Outline, locate, read_outline
from danling.utils.files import open_file, plain_name, read_text
from danling.utils.messages import as_text
from danling.utils.plain import flatten, parse_json

from .output import OK, add_json, as_bytes, print_json, print_table
from .source import checkpoint_at, is_url

_HEADER_LIMIT = 100 << 20
"""Bytes of the largest header that is read; the format allows 100 MB."""
_MODEL = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "checkpoint",
        help="a checkpoint, a directory with a latest one, or a file of weights; or its URL",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--config", action="store_true", help="print the settings it was made with")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the contents."""
    with checkpoint_at(options.checkpoint) as path:
        contents = read_contents(path)
    location = options.checkpoint if is_url(options.checkpoint) else str(contents.path)
    if options.json:
        facts: dict[str, Any] = {"path": location, "kind": contents.kind, **describe(contents)}
        facts["sections"] = contents.sections()
        if options.tensors:
            facts["tensors"] = [vars(entry) for entry in contents.entries]
        if options.config:
            facts["config"] = contents.plain.get("runner", {})
        print_json(facts)
        return OK
    print(f"{as_text(location)} ({contents.kind})")
    for name, value in describe(contents).items():
        print(f"{name}: {as_text(value)}")
    print()
    rows = [
        (
            name,
            row["tensors"],
            row["elements"],
            as_bytes(row["bytes"]),
            ", ".join(sorted(row["dtypes"])),
        )
        for name, row in contents.sections().items()
    ]
    print_table(("section", "tensors", "elements", "size", "dtypes"), rows)
    if options.tensors:
        print()
        lines = [
            (e.name, e.dtype, list(e.shape), as_bytes(e.size), e.chunks) for e in contents.entries
        ]
        print_table(("tensor", "dtype", "shape", "size", "pieces"), lines)
    if options.config:
        print()
        settings = contents.plain.get("runner", {}) if contents.is_own else {}
        for name, value in flatten(settings, keeps_empty=True).items():
            print(f"{as_text(name)}: {as_text(value)}")
    return OK


def describe(contents: Outline) -> dict[str, object]:
    """Return the known facts about a checkpoint in a few plain values."""
    # A file of another program may have other things under these names.
    plain = contents.plain if contents.is_own else {}
    state = plain.get("state", {})
    scores = state.get("scores") or {}
    facts = {
        "format_version": plain.get("format_version"),
        **(contents.record or {}),
        "world_size": state.get("elastic", {}).get("world_size"),
        "samples": state.get("train", {}).get("samples"),
        "best_score": scores.get("best_score"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def read_contents(source: str | Path) -> Outline:
    """Return the content of a checkpoint, a `.safetensors` file, or any file of `torch.save`."""
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return read_safetensors(path)
    if path.name.endswith(".safetensors.index.json") and path.is_file():
        return _read_index(path)
    # As `danling export` and the Hugging Face libraries write weights in a directory.
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else []
    exported = [file for file in files if _MODEL.fullmatch(file.name)]
    if exported:
        parts = [read_safetensors(file) for file in exported]
        return Outline(
            "safetensors", path, [entry for part in parts for entry in part.entries], parts[0].plain
        )
    store, found = locate(path)
    target = store.target(found)
    if target.is_dir():
        # Tensors stay unread, so that sizes are enough.
        store.verify(found, "size")
    contents = read_outline(target)
    # A file of another program has no sizes to be compared with.
    if contents.is_own and not target.is_dir():
        store.verify(found, "size")
    try:
        record = store.record(found)
    # A file without a record that can be read still has tensors to show.
    except CheckpointDamaged:
        return contents
    names = ("run", "sequence", "step", "epoch")
    contents.record = {name: getattr(record, name) for name in names}
    return contents


def _read_index(path: Path) -> Outline:
    """Return what the headers of the files say that an index of safetensors names."""
    try:
        files = dict(parse_json(read_text(path))["weight_map"])
        names = sorted({plain_name(file) for file in files.values()})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(
            f"Expected an index of safetensors. Received: {path}: {error!r}"
        ) from error
    parts = [read_safetensors(path.parent / name) for name in names]
    entries = [entry for part in parts for entry in part.entries]
    missing = sorted(files.keys() - {entry.name for entry in entries})
    if missing:
        raise CheckpointDamaged(
            f"Expected all tensors of {path}. Received files without: {', '.join(missing[:10])}."
        )
    return Outline("safetensors", path, entries, parts[0].plain if parts else {})


def read_safetensors(path: Path) -> Outline:
    """Return what the header of a safetensors file says (https://huggingface.co/docs/safetensors): eight bytes with its length,
    then JSON.
    """
    try:
        with open_file(path) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError(f"a header of {length} bytes")
            header = parse_json(file.read(length))
        plain = {"metadata": dict(header.pop("__metadata__", {}))}
        entries = [_safetensors_entry(name, about) for name, about in sorted(header.items())]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamaged(
            f"Expected a header of safetensors. Received: {path}: {error}"
        ) from error
    return Outline("safetensors", path, entries, plain)


def _safetensors_entry(name: str, about: Mapping[str, Any]) -> Entry:
    start, end = about["data_offsets"]
    dtype, shape = about["dtype"], list(about["shape"])
    # By type: a boolean counts as an integer otherwise.
    if not isinstance(dtype, str) or not all(
        type(size) is int and size >= 0 for size in (*shape, start, end - start)
    ):
        raise ValueError(f"{name!r} is no tensor")
    return Entry(name, dtype, tuple(shape), end - start)
