"""Files of `torch.save`: read without running anything that is in them, and told from those of other programs."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile, ZipInfo

import torch

from danling.utils.files import is_text, open_file
from danling.utils.tensors import local_part

from . import storage
from .errors import CheckpointDamaged, CheckpointMismatch, disk_error
from .file_store import has_sums
from .manifest import archive_complaints, is_archive
from .payload import check_sections
from .pickles import is_too_deep
from .reading import Outline, tensors_in, without_tensors
from .target_store import SUMS

FORMAT_VERSION = 3
"""`format_version` of new files, and the newest one that can be read."""
CHANGED_SINCE = {
    1: "NumPy, `random` and each generator draw from separate keys, averages of weights are in float32, and buffers of averages are "
    "copied, not averaged",
    2: "on a mesh, buffers that training reads are those of the first rank in every update, and with three or more ranks "
    "DistributedDataParallel adds gradients in the same order after a resume",
}
"""What a run computes differently since a format, by the last version of it."""

# Far more than any state has, and few enough to walk over in seconds.
_DEEPEST, _MOST_VALUES = 200, 20_000_000
_DEEPEST_PICKLE = 1000
"""Levels of operations, of which a value may take several; hashing a key of so many is safe."""
_LENGTHS_IN_HEADER = 26
"""Where a record's header says how long its name and its further fields are (PKWARE's APPNOTE, 4.3.7)."""


def read_file(path: Path, *, mmap: bool = False) -> Any:
    """Read any file of `torch.save`, with torch's safe reader."""
    # The older format of torch.save is no zip file, and can only be read whole.
    is_zip = is_archive(path)
    # torch compares no sums, and takes the sizes that an archive claims.
    problems = archive_complaints(path, tensors=False, required=False) if is_zip else []
    if problems:
        raise CheckpointDamaged(
            f"Expected a file of torch.save. Received: {path}: {'; '.join(problems[:5])}."
        )
    try:
        # Before torch reads it, which may end the process (`pickles.py`).
        _check_depth(path, is_zip=is_zip)
        if is_text(path):
            payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)
        else:
            # torch opens paths in UTF-8 only.
            with open_file(path) as file:
                payload = torch.load(file, map_location="cpu", weights_only=True)
        check_values(payload, path, size=storage.size_of(path))
        return payload
    except CheckpointDamaged:
        raise
    except OSError as error:
        raise disk_error("read", path, error) from error
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected a file of torch.save. Received: {path}, {why_unreadable(error)}"
        ) from error


def _check_depth(path: Path, *, is_zip: bool) -> None:
    """Refuse a file whose values are nested so deeply that reading them could end the process."""
    with open_file(path) as file:
        if is_zip:
            with ZipFile(file) as archive:
                record = next(
                    (each for each in archive.infolist() if each.filename.endswith("data.pkl")),
                    None,
                )
                content = _stored_content(file, record) if record is not None else b""
            is_deep = bool(content) and is_too_deep(BytesIO(content), _DEEPEST_PICKLE)
        else:
            # The older format has three small pickles before that of the values.
            is_deep = any(is_too_deep(file, _DEEPEST_PICKLE) for _ in range(4))
    if is_deep:
        raise CheckpointDamaged(
            f"Expected values of at most {_DEEPEST} levels. Received: {path}, with more."
        )


def _stored_content(file: BinaryIO, record: ZipInfo) -> bytes:
    """Return the bytes of a record that is not compressed; `zipfile` would refuse one without a CRC-32, which torch may leave out."""
    file.seek(record.header_offset + _LENGTHS_IN_HEADER)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    file.seek(name_length + extra_length, os.SEEK_CUR)
    return file.read(record.file_size)


def check_values(payload: object, path: Path, *, size: int | None = None) -> None:
    """Refuse values over which no reader could walk: a few bytes of a pickle can make any number of them."""
    level = {id(payload): (payload, 1)}  # each value once, with how often it comes
    count = 0
    for _ in range(_DEEPEST):
        below: dict[int, tuple[Any, int]] = {}
        for value, times in level.values():
            if isinstance(value, torch.Tensor):
                # A pickle may claim any shape over a small storage, by strides of 0 for example.
                value = local_part(value)
                wanted = value.numel() * value.element_size()
                if size is not None and wanted > max(size, value.untyped_storage().nbytes()):
                    raise CheckpointDamaged(
                        f"Expected tensors that are in the file. Received: {path}, in which one has {wanted} bytes and the file {size}."
                    )
            elif isinstance(value, (dict, list, tuple)):
                # A value that is referred to twice is walked over twice by readers.
                count += times * len(value)
                # Keys may be tuples of tuples.
                for inner in (*value, *value.values()) if isinstance(value, dict) else value:
                    if isinstance(inner, (torch.Tensor, dict, list, tuple)):
                        below[id(inner)] = (inner, times + below.get(id(inner), (None, 0))[1])
        if count > _MOST_VALUES:
            raise CheckpointDamaged(
                f"Expected at most {_MOST_VALUES:,} values. Received: {path}, with more."
            )
        level = below
        if not level:
            return
    raise CheckpointDamaged(
        f"Expected values of at most {_DEEPEST} levels. Received: {path}, with more."
    )


def why_unreadable(error: Exception) -> str:
    """Return in one line why torch does not read a file or an entry."""
    # torch answers with paragraphs, colours and the advice to run the code in the file.
    forbidden = re.search(r"Unsupported (?:global: GLOBAL|class) ([\w.]+\w)", str(error))
    if forbidden:
        package = forbidden[1].partition(".")[0]
        return (
            f"which holds an object of {forbidden[1]}, and objects of classes are not read; save its state_dict() instead. A tensor "
            f"of such a class is read in a program that imports {package} before."
        )
    first = (str(error).splitlines() or [""])[0].rstrip(".")
    is_plain = (
        isinstance(error, (RuntimeError, MemoryError))
        and "weights_only" not in first
        and "\x1b" not in first
    )
    if first and is_plain:
        return f"which torch cannot read: {first}."
    return "which is damaged, or something else; `danling verify` shows damage of a checkpoint."


def check_format(payload: Any, path: Path) -> dict[str, object]:
    """Return a payload that this version understands."""
    version = payload.get("format_version") if isinstance(payload, Mapping) else None
    if type(version) is not int or version < 1:
        # Only this library writes checksums next to a file.
        is_own = has_sums(path) or storage.size_of(path / SUMS) is not None
        kind = CheckpointDamaged if is_own else CheckpointMismatch
        raise kind(
            f"Expected a checkpoint of this library. Received: {path}, which has no format_version. Load bare weights with `pretrained`."
        )
    if version > FORMAT_VERSION:
        raise CheckpointMismatch(
            f"Expected a checkpoint of format_version {FORMAT_VERSION} or older. Received: {path} of format_version {version}. Update "
            "danling to read it."
        )
    check_sections(payload, path)
    return dict(payload)


def holds_format(path: Path) -> bool:
    """Whether a file is a checkpoint of this library, by its content."""
    return is_own(read_file(path, mmap=True))


def is_own(payload: object) -> bool:
    """Whether a payload was saved by this library."""
    return isinstance(payload, Mapping) and "format_version" in payload


# The reader of single files


def read_payload(
    path: Path,
    *,
    template: object = None,
    sections: frozenset[str] | None = None,
    mmap: bool = False,
    trust: bool = False,
) -> dict[str, object]:
    """Return the payload of a checkpoint file; see `reading.read_payload`."""
    payload = check_format(read_file(path, mmap=mmap), path)
    return {name: value for name, value in payload.items() if sections is None or name in sections}


def read_outline(path: Path) -> Outline:
    """Return the content of a file of `torch.save`, of this library or of another program; see `reading.read_outline`."""
    payload, kind = read_file(path, mmap=True), "torch file"
    if is_own(payload):
        payload, kind = check_format(payload, path), "file"
    plain = without_tensors(payload) if isinstance(payload, Mapping) else {}
    return Outline(kind, path, list(tensors_in(payload)), plain)
