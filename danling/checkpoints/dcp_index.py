"""Where a value of the state is in a target: its dotted name, and the index, plain JSON that says which file has which part of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
from danling.utils.trees import tensors

from . import storage
from .errors import CheckpointDamaged, CheckpointError

INDEX = "index.json"
FORMAT = "danling-index 1"

# Bounds of what is read from a file that anybody may have written.
_DEEPEST = 200
_LARGEST_INDEX = 1 << 30
_MOST_CUTS = 8
"""Dimensions of a tensor that may be cut; each doubles the corners that are compared."""

# A nested state, and the flat one of torch

Place = tuple[Any, ...]
"""The keys of a leaf, from the outside."""


def flatten(state: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Place]]:
    """Return the leaves of a state by dotted name, and the path of each.

    A leaf is a tensor, or the largest part that holds none: settings and results go into one entry each instead of one a value, keep
    their empty parts and their integer keys, and come back as they were.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Place] = {}
    for path, leaf in _leaves(state, ()):
        name = ".".join(map(str, path))
        if name in flat:
            raise CheckpointError(
                f"Expected one value for each name. Received: two parts of the state named {name!r}. Rename one."
            )
        flat[name], paths[name] = leaf, path
    return flat, paths


def _leaves(value: Any, path: Place) -> list[tuple[Place, Any]]:
    is_plain = bool(path) and not any(tensors(value))
    if is_plain or isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, Mapping):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is not None:
            raise CheckpointError(
                f"Expected string keys above tensors. Received: {'.'.join(map(str, path))}[{strange!r}]. Key it by a string."
            )
        return [leaf for key, item in value.items() for leaf in _leaves(item, (*path, key))]
    return [leaf for index, item in enumerate(value) for leaf in _leaves(item, (*path, index))]


def nest(flat: Mapping[str, object], paths: Mapping[str, Place]) -> Any:
    """Return the state that `flatten` was given; tuples with tensors come back as lists."""
    below: dict[Any, dict[str, Place]] = {}
    for name in flat:
        key, *rest = paths[name]
        below.setdefault(key, {})[name] = tuple(rest)
    # One level a call; the names stay whole, and their paths get shorter.
    nested: dict[Any, Any] = {}
    for key, inner in below.items():
        leaves = [name for name, rest in inner.items() if not rest]
        if leaves and len(inner) > 1:
            raise CheckpointDamaged(
                f"Expected one value at each path. Received: {leaves[0]}, and values below it."
            )
        nested[key] = (
            flat[leaves[0]] if leaves else nest({name: flat[name] for name in inner}, inner)
        )
    # Above tensors all keys of mappings are texts (`_leaves`), so integers are places in a list.
    if nested and all(type(key) is int for key in nested):
        return [nested[index] for index in sorted(nested)]
    return nested


# The index: which file has which part of each tensor. torch keeps the same in `.metadata`, a pickle, for its own reader.


def index_text(metadata: Metadata) -> str:
    """Return the index as JSON. A chunk is `[offsets, sizes, file, offset, length]`, where `file` counts in `files`."""
    # Before it is written, too: an index that no reader takes is a save that is lost.
    _check_index(metadata)
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
                "chunks": [
                    [list(c.offsets), list(c.sizes), *place(name, c.offsets)] for c in about.chunks
                ],
            }
        else:
            values[name] = {"path": path, "place": place(name)}
    content = {"format": FORMAT, "files": files, "tensors": tensors, "values": values}
    return json.dumps(content, separators=(",", ":")) + "\n"


def parse_index(text: str) -> Metadata:
    """Read an index into what torch's reader takes. What is wrong with it is a `ValueError`."""
    content = parse_json(text)
    if not isinstance(content, Mapping) or content.get("format") != FORMAT:
        raise ValueError(f"it is no {FORMAT}")
    entries: dict[str, Any] = {}
    paths: dict[str, Place] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    try:
        files = [plain_name(file) for file in content["files"]]

        def stored(place: object) -> _StorageInfo:
            file, offset, length = _numbers(place)
            return _StorageInfo(files[file], offset, length)

        for name, about in content["tensors"].items():
            chunks = []
            for offsets, sizes, *place in about["chunks"]:
                chunks.append(ChunkStorageMetadata(_numbers(offsets), _numbers(sizes)))
                places[MetadataIndex(name, chunks[-1].offsets)] = stored(place)
            properties = TensorProperties(dtype=dtype_of(str(about["dtype"])))
            entries[name] = TensorStorageMetadata(properties, _numbers(about["shape"]), chunks)
            paths[name] = _keys(about["path"])
        for name, about in content["values"].items():
            entries[name] = BytesStorageMetadata()
            paths[name] = _keys(about["path"])
            places[MetadataIndex(name)] = stored(about["place"])
    # What of the structure is wrong shows in one of these; the values are checked one by one.
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"a part of it is missing or of another kind: {error!r}") from error
    metadata = Metadata(entries, planner_data=paths, storage_data=places)
    _check_index(metadata)
    return metadata


def _check_index(metadata: Metadata) -> None:
    """Refuse tensors whose chunks do not come to their shape, or to the bytes in the files."""
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            fits = len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
            ends = zip(chunk.offsets, chunk.sizes, tensor.size)
            if not fits or any(offset + size > whole for offset, size, whole in ends):
                raise ValueError(f"a chunk of {name} is not within its shape {list(tensor.size)}")
            length = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)].length
            if math.prod(chunk.sizes) * tensor.properties.dtype.itemsize > length:
                raise ValueError(
                    f"a chunk of {name} has {length} bytes, fewer than its elements take"
                )
        # What no chunk covers would stay memory that nothing was read into.
        if not _tile(tensor.size, tensor.chunks):
            raise ValueError(f"the chunks of {name} do not make up its shape {list(tensor.size)}")


def _tile(shape: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether chunks within a tensor cover each element once: then their corners, with signs, are those of the whole."""
    cut = [
        dim for dim, whole in enumerate(shape) if any(chunk.sizes[dim] != whole for chunk in chunks)
    ]
    # A tensor without elements needs no chunk; one that is cut so often was made up.
    if 0 in shape or len(cut) > _MOST_CUTS:
        return 0 in shape
    # Where boxes meet, their corners cancel out. The whole counts with the other sign, so that nothing
    # is left if they fill it; at a gap or an overlap a corner is left.
    boxes = [([(chunk.offsets[dim], chunk.sizes[dim]) for dim in cut], 1) for chunk in chunks]
    corners = Counter[tuple[int, ...]]()
    for box, sign in [*boxes, ([(0, shape[dim]) for dim in cut], -1)]:
        for corner in product(*([(start, 1), (start + size, -1)] for start, size in box)):
            corners[tuple(place for place, _ in corner)] += sign * math.prod(
                factor for _, factor in corner
            )
    return not any(corners.values())


def _numbers(values: Any) -> torch.Size:
    strange = next(
        (value for value in values if type(value) is not int or not 0 <= value < 1 << 62), None
    )
    if strange is not None:
        raise TypeError(f"{strange!r} is no whole number from 0 to 2^62")
    return torch.Size(values)


def _keys(values: Any) -> Place:
    if not 0 < len(values) < _DEEPEST or any(type(key) not in (str, int) for key in values):
        raise TypeError(f"{values!r:.80} is no path of keys")
    return tuple(values)


def read_index(directory: Path, *, trust: bool = False) -> Metadata:
    """Return the index of a target, whose files are there and have as many bytes as it names."""
    path = directory / INDEX
    if storage.size_of(path) is not None:
        try:
            metadata = parse_index(storage.read_text(path, limit=_LARGEST_INDEX))
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            raise CheckpointDamaged(
                f"Expected an index of a sharded checkpoint. Received: {path}: {error}"
            ) from error
    elif trust:
        try:
            # Through the same checks as an index of our own.
            metadata = parse_index(index_text(FileSystemReader(directory).read_metadata()))
        # Unpickling may raise anything.
        except Exception as error:
            raise CheckpointDamaged(
                f"Expected the metadata of a sharded checkpoint. Received: {directory}: {error}"
            ) from error
    else:
        raise CheckpointError(
            f"Expected {INDEX} in a sharded checkpoint. Received: {directory}, which another program wrote. Convert it with `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or set checkpoint.trust=true, which unpickles "
            "`.metadata` and so runs the code in it."
        )
    places = (metadata.storage_data or {}).values()
    sizes = {
        place.relative_path: storage.size_of(directory / place.relative_path) for place in places
    }
    # A read would wait for a pipe: files that are not regular count as missing.
    missing = sorted(file for file, size in sizes.items() if size is None)
    if missing:
        raise CheckpointDamaged(
            f"Expected the files of {directory}. Received: no {', '.join(missing[:5])}. Use another checkpoint."
        )
    # Memory is allocated for what the index names: together not more than there is in the files.
    if sum(place.length for place in places) > sum(size or 0 for size in sizes.values()):
        raise CheckpointDamaged(
            f"Expected the files of {directory}. Received: an index that names more bytes than they have. Use another checkpoint."
        )
    return metadata
