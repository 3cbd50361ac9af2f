"""The index of a sharded checkpoint: which file has which part of each tensor, in plain JSON, read without running anything.

torch keeps the same in `.metadata`, a pickle, which stays for torch's own reader.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danling.utils.files import plain_name
from danling.utils.plain import parse_json

from . import storage
from .errors import CheckpointDamaged, CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = "index.json"
FORMAT = "danling-index 1"

_MOST_CUTS = 8
"""Dimensions of a tensor that may be cut; each doubles the corners that are compared."""

Name = tuple["str | int", ...]


@dataclass(frozen=True)
class Extent:
    """A stretch of a file.

    Attributes:
        file: Name of a file in the directory of the index.
        offset: First byte.
        length: Number of bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        offsets: Where it begins in each dimension of the whole tensor.
        sizes: Its shape.
        extent: Its place.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True)
class TensorEntry:
    """A tensor.

    Attributes:
        path: Its keys in the state, from the outside.
        dtype: Its dtype, as torch prints it, less `torch.`.
        shape: Its whole shape.
        chunks: The parts that it is stored in.
    """

    path: Name
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ValueEntry:
    """Plain values that were saved together.

    Attributes:
        path: Their keys in the state, from the outside.
        extent: Their place.
    """

    path: Name
    extent: Extent


@dataclass(frozen=True)
class ShardIndex:
    """All tensors and plain values of a checkpoint, by dotted name."""

    tensors: dict[str, TensorEntry]
    values: dict[str, ValueEntry]

    def check(self) -> ShardIndex:
        """Return the index if its parts fit together."""
        for name, tensor in self.tensors.items():
            # What no chunk covers would stay memory that nothing was read into.
            if not _tile(tensor.shape, tensor.chunks):
                raise ValueError(f"the chunks of {name} do not make up its shape {list(tensor.shape)}")
        for file in {extent.file for extent in self.extents()}:
            plain_name(file)
        return self

    def extents(self) -> list[Extent]:
        """Return every stretch of a file that is named."""
        chunks = [chunk.extent for tensor in self.tensors.values() for chunk in tensor.chunks]
        return [*chunks, *(value.extent for value in self.values.values())]

    def text(self) -> str:
        """Return the index as JSON. A chunk is `[offsets, sizes, file, offset, length]`, where `file` counts in `files`."""
        files = sorted({extent.file for extent in self.extents()})
        number = {file: index for index, file in enumerate(files)}

        def place(extent: Extent) -> list[int]:
            return [number[extent.file], extent.offset, extent.length]

        tensors = {
            name: {
                "path": list(entry.path),
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "chunks": [[list(c.offsets), list(c.sizes), *place(c.extent)] for c in entry.chunks],
            }
            for name, entry in self.tensors.items()
        }
        values = {name: {"path": list(e.path), "place": place(e.extent)} for name, e in self.values.items()}
        content = {"format": FORMAT, "files": files, "tensors": tensors, "values": values}
        return json.dumps(content, separators=(",", ":")) + "\n"

    @classmethod
    def parse(cls, text: str) -> ShardIndex:
        """Read an index."""
        content = parse_json(text)
        if not isinstance(content, Mapping) or content.get("format") != FORMAT:
            raise ValueError(f"it is no {FORMAT}")
        try:
            files = [string(file) for file in content["files"]]
            tensors = {name: _tensor(about, files) for name, about in content["tensors"].items()}
            values = {
                name: ValueEntry(path_of(about["path"]), _extent(about["place"], files))
                for name, about in content["values"].items()
            }
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"a part of it is missing or of another kind: {error!r}") from error
        return cls(tensors, values).check()


def _tile(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
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


def _tensor(about: Mapping[str, Any], files: list[str]) -> TensorEntry:
    chunks = tuple(
        Chunk(whole(offsets), whole(sizes), _extent(place, files)) for offsets, sizes, *place in about["chunks"]
    )
    return TensorEntry(path_of(about["path"]), string(about["dtype"]), whole(about["shape"]), chunks)


def _extent(place: object, files: list[str]) -> Extent:
    file, offset, length = whole(place)
    return Extent(files[file], offset, length)


def string(value: object) -> str:
    """Return a value that must be a string."""
    if type(value) is not str:
        raise TypeError(f"{value!r} is no string")
    return value


def whole(values: Any) -> tuple[int, ...]:
    """Return values that must be whole numbers from 0."""
    found = tuple(values)
    strange = next((value for value in found if type(value) is not int or value < 0), None)
    if strange is not None:
        raise TypeError(f"{strange!r} is no whole number from 0")
    return found


def path_of(keys: Any) -> Name:
    """Return keys that must be strings, or numbers of places in a list."""
    found = tuple(keys)
    strange = next((key for key in found if type(key) not in (str, int)), None)
    if not found or strange is not None:
        raise TypeError(f"{keys!r} is no path of keys")
    return found


def read_index(directory: Path, *, trust: bool = False) -> ShardIndex:
    """Return the index of a target."""
    path = directory / INDEX
    if storage.size_of(path) is not None:
        try:
            return ShardIndex.parse(storage.read_text(path, limit=None))
        except (ValueError, RecursionError, MemoryError, OSError) as error:
            raise CheckpointDamaged(f"Expected an index of a sharded checkpoint. Received: {path}: {error}") from error
    if not trust:
        raise CheckpointError(
            f"Expected {INDEX} in a sharded checkpoint. Received: {directory}, which another program wrote. Convert it with `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch DIRECTORY FILE`, or set checkpoint.trust=true, which unpickles "
            "`.metadata` and so runs what is in it."
        )
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return from_metadata(FileSystemReader(directory).read_metadata())
    except Exception as error:
        raise CheckpointDamaged(
            f"Expected the metadata of a sharded checkpoint. Received: {directory}: {error}"
        ) from error


def from_metadata(metadata: Metadata) -> ShardIndex:
    """Return the index of what `torch.distributed.checkpoint` has written."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    def extent(key: MetadataIndex) -> Extent:
        place = metadata.storage_data[key]
        return Extent(str(place.relative_path), int(place.offset), int(place.length))

    tensors: dict[str, TensorEntry] = {}
    values: dict[str, ValueEntry] = {}
    for name, about in metadata.state_dict_metadata.items():
        path = tuple((metadata.planner_data or {}).get(name, (name,)))
        if not isinstance(about, TensorStorageMetadata):
            values[name] = ValueEntry(path, extent(MetadataIndex(name)))
            continue
        chunks = tuple(
            Chunk(tuple(c.offsets), tuple(c.sizes), extent(MetadataIndex(name, c.offsets))) for c in about.chunks
        )
        dtype = str(about.properties.dtype).removeprefix("torch.")
        tensors[name] = TensorEntry(path, dtype, tuple(about.size), chunks)
    return ShardIndex(tensors, values).check()


def to_metadata(index: ShardIndex) -> Metadata:
    """Return an index as `torch.distributed.checkpoint` has it."""
    import torch
    from torch.distributed.checkpoint import metadata as stock

    from danling.utils.tensors import dtype_of

    places: dict[stock.MetadataIndex, Any] = {}
    entries: dict[str, Any] = {}
    for name, tensor in index.tensors.items():
        chunks = [stock.ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = stock.TensorProperties(dtype=dtype_of(tensor.dtype))
        entries[name] = stock.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for chunk in tensor.chunks:
            if math.prod(chunk.sizes) * properties.dtype.itemsize > chunk.extent.length:
                raise ValueError(f"a chunk of {name} has {chunk.extent.length} bytes, fewer than its elements take")
            places[stock.MetadataIndex(name, chunk.offsets)] = _stored(chunk.extent)
    for name, value in index.values.items():
        entries[name] = stock.BytesStorageMetadata()
        places[stock.MetadataIndex(name)] = _stored(value.extent)
    paths = {name: tensor.path for name, tensor in index.tensors.items()}
    paths.update({name: value.path for name, value in index.values.items()})
    return stock.Metadata(entries, planner_data=paths, storage_data=places)


def _stored(extent: Extent) -> object:
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(extent.file, extent.offset, extent.length)
