"""Reading what lies where in a sharded checkpoint: its index, or torch's `.metadata`, a pickle, through a fixed table of names.

A pickle names what it calls by module and name, and from protocol 4 on a name may have dots that lead out of its module. Here a pair
is looked up in a table, never imported, and what stands in the table are stand-ins of this module that keep what they are given:
nothing of torch's is built or called.
"""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from . import storage
from .errors import CheckpointDamaged
from .shard_index import INDEX, Chunk, Extent, ShardIndex, TensorEntry, ValueEntry, path_of, string, whole

_LARGEST_TUPLE = 100_000


class _Part:
    """A record of the pickle. It has no attributes but the one, and its class takes none: a pickle can change neither."""

    __slots__ = ("state",)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Part):
    __slots__ = ()


class _Tensor(_Part):
    __slots__ = ()


class _Bytes(_Part):
    __slots__ = ()


class _Properties(_Part):
    __slots__ = ()


class _Chunk(_Part):
    __slots__ = ()


class _Key(_Part):
    __slots__ = ()


class _Place(_Part):
    __slots__ = ()


class _Unused(_Part):
    __slots__ = ()


class _Function:
    """What a pickle may call."""

    __slots__ = ()


class _Size(_Function):
    __slots__ = ()

    def __call__(self, values: Any = ()) -> tuple[int, ...]:
        return whole(values)


class _Ignored(_Function):
    """Layouts, memory formats and paths: nothing depends on them."""

    __slots__ = ()

    def __call__(self, *values: Any) -> None:
        return None


class _Member(_Function):
    """`getattr`, as Python 3.11.0 to 3.11.3 writes a member of an enumeration; newer ones write its value."""

    __slots__ = ()

    def __call__(self, kind: Any, name: object) -> None:
        if kind is not _IGNORED:
            raise pickle.UnpicklingError(f"getattr of {name!r} is no part of metadata")


_IGNORED, _SIZE, _MEMBER = _Ignored(), _Size(), _Member()
_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")

TABLE: Mapping[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "ChunkStorageMetadata"): _Chunk,
    (_METADATA, "MetadataIndex"): _Key,
    (_METADATA, "StorageMeta"): _Unused,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _IGNORED,
    (_FILES, "_StorageInfo"): _Place,
    ("torch", "Size"): _SIZE,
    ("torch.serialization", "_get_layout"): _IGNORED,
    ("torch._utils", "_rebuild_layout"): _IGNORED,
    ("builtins", "getattr"): _MEMBER,
    **{(module, name): _IGNORED for module in ("pathlib", "pathlib._local") for name in _PATHS},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""What a name in the pickle becomes, by module and qualified name."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        # Not handed on: the inherited one imports.
        found = TABLE.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of metadata")
        return found


def read_index(directory: Path) -> ShardIndex:
    """Return what lies where in a target: from its index, or from `.metadata` where it has none.

    Checkpoints of earlier versions, and what other programs wrote, have none.

    Raises:
        CheckpointDamaged: If it cannot be read.
    """
    path = directory / INDEX
    if storage.size_of(path) is None:
        return read_stock_metadata(directory / ".metadata")
    try:
        return ShardIndex.parse(storage.read_text(path, limit=None))
    except (ValueError, RecursionError, MemoryError, OSError) as error:
        raise CheckpointDamaged(f"Expected an index of a sharded checkpoint. Received: {path}: {error}") from error


def read_stock_metadata(path: Path) -> ShardIndex:
    """Return what `.metadata` says lies where.

    Raises:
        CheckpointDamaged: If it cannot be read, or holds anything else.
    """
    if storage.size_of(path) is None:
        raise CheckpointDamaged(f"Expected the metadata of a sharded checkpoint. Received: {path}, which is no file.")
    try:
        with os.fdopen(storage.open_regular(path), "rb") as file:
            _refuse_large_tuples(file)
            file.seek(0)
            return _index(_Unpickler(file).load())
    except Exception as error:
        raise CheckpointDamaged(f"Expected the metadata of a sharded checkpoint. Received: {path}: {error}") from error


def _refuse_large_tuples(file: BinaryIO) -> None:
    """Refuse a tuple with more than 100,000 values: as a key it is hashed, and one that holds another twice, level by level, for ever."""
    stack: list[int | None] = []
    memo: dict[Any, int | None] = {}
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "MARK":
            stack.append(None)
        elif operation.name.endswith("GET"):
            stack.append(memo.get(argument, 1))
        elif operation.name.endswith("PUT") or operation.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = stack[-1]
        else:
            size = 1
            for kind in reversed(operation.stack_before):
                if kind is pickletools.stackslice:
                    while (value := stack.pop()) is not None:
                        size += value
                elif kind is not pickletools.markobject:
                    size += stack.pop() or 0
            if operation.name.startswith("TUPLE") and size > _LARGEST_TUPLE:
                raise ValueError(f"it has a tuple of more than {_LARGEST_TUPLE:,} values")
            stack += [size] * len(operation.stack_after)


def _index(metadata: Any) -> ShardIndex:
    content = _fields(metadata, _Metadata)
    paths = content.get("planner_data") or {}
    places = {}
    for key, place in content["storage_data"].items():
        about = _fields(key, _Key)
        offset = about.get("offset")
        places[string(about["fqn"]), None if offset is None else whole(offset)] = _extent(place)
    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    for name, entry in content["state_dict_metadata"].items():
        keys = path_of(paths.get(name, (name,)))
        if isinstance(entry, _Bytes):
            values[string(name)] = ValueEntry(keys, places[name, None])
        else:
            tensors[string(name)] = _tensor(name, keys, _fields(entry, _Tensor), places)
    return ShardIndex(tensors, values).check()


def _tensor(name: str, path: Any, about: Mapping[str, Any], places: Mapping[Any, Extent]) -> TensorEntry:
    if not isinstance(about["properties"], _Properties):
        raise ValueError(f"{name} has no properties")
    dtype = about["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    chunks = []
    for chunk in about["chunks"]:
        fields = _fields(chunk, _Chunk)
        offsets, sizes = whole(fields["offsets"]), whole(fields["sizes"])
        chunks.append(Chunk(offsets, sizes, places[name, offsets]))
    return TensorEntry(path, str(dtype).removeprefix("torch."), whole(about["size"]), tuple(chunks))


def _extent(place: Any) -> Extent:
    fields = _fields(place, _Place)
    if fields.get("transform_descriptors"):
        raise ValueError("its files are transformed, which this library does not undo")
    offset, length = whole((fields["offset"], fields["length"]))
    return Extent(string(fields["relative_path"]), offset, length)


def _fields(part: Any, kind: type[_Part]) -> Mapping[str, Any]:
    state = part.state if isinstance(part, kind) else None
    if not isinstance(state, dict):
        raise ValueError(f"a part of it is a {type(part).__name__}")
    return state
