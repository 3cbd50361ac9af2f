"""Lists what a checkpoint contains from its index; tensors stay on disk."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danling.checkpoints.errors import CheckpointDamaged
from danling.checkpoints.outline import Entry, Outline
from danling.checkpoints.reading import locate, read_outline
from danling.utils.files import open_file
from danling.utils.plain import parse_json

_HEADER_LIMIT = 100 << 20
_MODEL = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")


def read_contents(source: str | Path) -> Outline:
    """Return what is in a checkpoint, a `.safetensors` file, or any file of `torch.save`."""
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file():
        return read_safetensors(path)
    exported = _exported(path)
    if exported:
        parts = [read_safetensors(file) for file in exported]
        return Outline("safetensors", path, [entry for part in parts for entry in part.entries], parts[0].plain)
    store, found = locate(path)
    target = store.target(found)
    if target.is_dir():
        # Tensors stay unread, so that sizes are enough.
        store.verify(found, "size")
    contents = read_outline(target)
    if contents.is_own and not target.is_dir():
        store.verify(found, "size")
    try:
        record = store.record(found)
    except CheckpointDamaged:
        return contents
    names = ("run", "sequence", "step", "epoch")
    contents.record = {name: getattr(record, name) for name in names}
    return contents


def _exported(path: Path) -> list[Path]:
    """Return the files of weights in a directory as `danling export` and the Hugging Face libraries write them."""
    files = sorted(path.glob("model*.safetensors")) if path.is_dir() else []
    return [file for file in files if _MODEL.fullmatch(file.name)]


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
        raise CheckpointDamaged(f"Expected a header of safetensors. Received: {path}: {error}") from error
    return Outline("safetensors", path, entries, plain)


def _safetensors_entry(name: str, about: Mapping[str, Any]) -> Entry:
    start, end = about["data_offsets"]
    dtype, shape = about["dtype"], list(about["shape"])
    if not isinstance(dtype, str) or not all(type(size) is int and size >= 0 for size in (*shape, start, end - start)):
        raise ValueError(f"{name!r} is no tensor")
    return Entry(name, dtype, tuple(shape), end - start)
