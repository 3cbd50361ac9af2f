"""The index of a sharded checkpoint: which file has which part of each tensor, in plain JSON, read without running anything.

torch keeps the same in `.metadata`, a pickle, which stays for torch's own reader.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from danling.utils.files import plain_name
from danling.utils.plain import parse_json
from danling.utils.tensors import dtype_of

from . import storage
from .errors import CheckpointDamaged, CheckpointError

INDEX = "index.json"
FORMAT = "danling-index 1"

_MOST_CUTS = 8
"""Dimensions of a tensor that may be cut; each doubles the corners that are compared."""


def index_text(metadata: Metadata) -> str:
    """Return the index as JSON. A chunk is `[offsets, sizes, file, offset, length]`, where `file` counts in `files`."""
    _check(metadata)
    stored, paths = metadata.storage_data or {}, metadata.planner_data or {}
    files = sorted({str(place.relative_path) for place in stored.values()})
    number = {file: index for index, file in enumerate(files)}

    def place(name: str, offsets: torch.Size | None = None) -> list[int]:
        found = stored[MetadataIndex(name, offsets)]
        return [number[str(found.relative_path)], int(found.offset), int(found.length)]

    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, about in metadata.state_dict_metadata.items():
        path = list(paths.get(name, (name,)))
        if isinstance(about, TensorStorageMetadata):
            tensors[name] = {
                "path": path,
                "dtype": str(about.properties.dtype).removeprefix("torch."),
                "shape": list(about.size),
                "chunks": [[list(c.offsets), list(c.sizes), *place(name, c.offsets)] for c in about.chunks],
            }
        else:
            values[name] = {"path": path, "place": place(name)}
    content = {"format": FORMAT, "files": files, "tensors": tensors, "values": values}
    return json.dumps(content, separators=(",", ":")) + "\n"


def parse_index(text: str) -> Metadata:
    """Read an index into what torch's reader takes."""
    content = parse_json(text)
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"it is no {FORMAT}")
    entries: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    try:
        files = [plain_name(_string(file)) for file in content["files"]]
        for name, about in content["tensors"].items():
            chunks = []
            for offsets, sizes, *place in about["chunks"]:
                chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
                places[MetadataIndex(name, chunk.offsets)] = _stored(place, files)
                chunks.append(chunk)
            properties = TensorProperties(dtype=dtype_of(_string(about["dtype"])))
            entries[name] = TensorStorageMetadata(properties, _size(about["shape"]), chunks)
            paths[name] = _path(about["path"])
        for name, about in content["values"].items():
            entries[name], paths[name] = BytesStorageMetadata(), _path(about["path"])
            places[MetadataIndex(name)] = _stored(about["place"], files)
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"a part of it is missing or of another kind: {error!r}") from error
    metadata = Metadata(entries, planner_data=paths, storage_data=places)
    _check(metadata)
    return metadata


def _check(metadata: Metadata) -> None:
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        # What no chunk covers would stay memory that nothing was read into.
        if not _tile(tensor.size, tensor.chunks):
            raise ValueError(f"the chunks of {name} do not make up its shape {list(tensor.size)}")
        for chunk in tensor.chunks:
            length = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)].length
            if math.prod(chunk.sizes) * tensor.properties.dtype.itemsize > length:
                raise ValueError(f"a chunk of {name} has {length} bytes, fewer than its elements take")


def _tile(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether chunks cover each element of a tensor once."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        if any(offset + size > whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape)):
            return False
    if 0 in shape:
        return True
    cut = [dim for dim, whole in enumerate(shape) if any(chunk.sizes[dim] != whole for chunk in chunks)]
    if len(cut) > _MOST_CUTS:
        return False
    corners = Counter[tuple[int, ...]]()
    for chunk in chunks:
        _add_corners(corners, [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for dim in cut], 1)
    _add_corners(corners, [(0, shape[dim]) for dim in cut], -1)
    return not any(corners.values())


def _add_corners(corners: Counter[tuple[int, ...]], box: Iterable[tuple[int, int]], sign: int) -> None:
    for corner in product(*([(start, 1), (end, -1)] for start, end in box)):
        corners[tuple(place for place, _ in corner)] += sign * math.prod(factor for _, factor in corner)


def _stored(place: object, files: list[str]) -> _StorageInfo:
    file, offset, length = _whole(place)
    return _StorageInfo(files[file], offset, length)


def _string(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is no string")
    return value


def _size(values: object) -> torch.Size:
    return torch.Size(_whole(values))


def _whole(values: Any) -> tuple[int, ...]:
    found = tuple(values)
    strange = next((value for value in found if type(value) is not int or not 0 <= value < 1 << 62), None)
    if strange is not None:
        raise TypeError(f"{strange!r} is no whole number from 0 to 2^62")
    return found


def _path(keys: Any) -> tuple[str | int, ...]:
    found = tuple(keys)
    strange = next((key for key in found if type(key) not in (str, int)), None)
    if not found or strange is not None:
        raise TypeError(f"{keys!r} is no path of keys")
    return found


def read_index(directory: Path, *, trust: bool = False) -> Metadata:
    path = directory / INDEX
    if storage.size_of(path) is not None:
        try:
            return parse_index(storage.read_text(path, limit=None))
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            raise CheckpointDamaged(f"Expected an index of a sharded checkpoint. Received: {path}: {error}") from error
    if not trust:
        raise CheckpointError(
            f"Expected {INDEX} in a sharded checkpoint. Received: {directory}, which another program wrote. Convert it with `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or set checkpoint.trust=true, which unpickles "
            "`.metadata` and so runs what is in it."
        )
    try:
        return parse_index(index_text(FileSystemReader(directory).read_metadata()))
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected the metadata of a sharded checkpoint. Received: {directory}: {error}"
        ) from error
