"""Reading a sharded checkpoint of which the files lie elsewhere: of each tensor, the bytes that this rank needs."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .errors import CheckpointDamaged
from .shard_index import ShardIndex

Range = tuple[int, int]
"""Where a stretch of bytes begins, and its length."""

_ENDS = 16 << 10
_MOST_RUNS = 4096


class Pieces(Protocol):
    """The files of a target that lies elsewhere."""

    @property
    def index(self) -> ShardIndex:
        """What lies where in them."""

    def bring(self, wanted: Mapping[str, Sequence[Range]]) -> None:
        """Make stretches of files readable, compared with their digests.

        Args:
            wanted: Ranges by file.

        Raises:
            CheckpointDamaged: If something is not what was written.
        """

    def open(self, file: str) -> BinaryIO:
        """Return a file as large as the whole, of which what was brought is there; whatever else is read of it has no meaning."""

    def close(self) -> None:
        """Remove what was brought."""


@dataclass
class _Read:
    """A tensor, or a part of it, that is to be read.

    Attributes:
        item: What the planner asks for.
        file: The file that has it.
        start: Where its archive begins in the file.
        length: Bytes of the archive.
        shape: Shape of the chunk that is stored.
        itemsize: Bytes of an element.
    """

    item: ReadItem
    file: str
    start: int
    length: int
    shape: tuple[int, ...]
    itemsize: int

    @property
    def whole(self) -> Range:
        return self.start, self.length

    @property
    def ends(self) -> list[Range]:
        """What says where the contents lie in the archive: its first record and its directory. All of it where it is small."""
        if self.length <= 2 * _ENDS:
            return [self.whole]
        return [(self.start, _ENDS), (self.start + self.length - _ENDS, _ENDS)]

    def needed(self, contents: Range | None) -> list[Range]:
        """Return the bytes of the elements that are asked for.

        Args:
            contents: Where the elements lie in the archive; `None` where that is not known.
        """
        if contents is None or contents[1] != math.prod(self.shape) * self.itemsize:
            return [self.whole]
        at = self.start + contents[0]
        runs = element_runs(self.shape, tuple(self.item.storage_offsets), tuple(self.item.lengths))
        return [(at + first * self.itemsize, count * self.itemsize) for first, count in runs]


def element_runs(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> list[Range]:
    """Return where a part of a contiguous tensor lies: the first element and the number of each run; many runs become one.

    Args:
        shape: Of the tensor.
        offsets: Where the part begins in each dimension.
        lengths: Its shape.
    """
    if 0 in lengths:
        return []
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Beyond the last dimension that is cut, elements lie side by side.
    last = max((dim for dim, length in enumerate(lengths) if length != shape[dim]), default=-1)
    if last < 0:
        return [(0, math.prod(shape))]
    count = lengths[last] * strides[last]
    first = sum(offset * stride for offset, stride in zip(offsets, strides))
    outer = [range(length) for length in lengths[:last]]
    if math.prod(map(len, outer)) > _MOST_RUNS:
        end = first + sum((length - 1) * stride for length, stride in zip(lengths[: last + 1], strides)) + strides[last]
        return [(first, end - first)]
    return [(first + sum(i * stride for i, stride in zip(place, strides)), count) for place in product(*outer)]


class PiecesReader(FileSystemReader):
    """Reads a target that lies elsewhere.

    Args:
        pieces: Its files.
        metadata: What lies where in them.
    """

    def __init__(self, pieces: Pieces, metadata: Metadata) -> None:
        super().__init__(Path("."))
        self.pieces = pieces
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what lies where."""
        return self.metadata

    def validate_checkpoint_id(self, *args: Any) -> bool:  # type: ignore[override]
        """Whether it can be read: it can."""
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring what the plan asks for, and hand it to the planner."""
        values = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        reads = [self._read_of(item) for item in plan.items if item.type != LoadItemType.BYTE_IO]
        self._bring([(*self._place(item),) for item in values] + [(r.file, *end) for r in reads for end in r.ends])
        self._bring([(read.file, *part) for read in reads for part in read.needed(self._contents(read))])
        for item in values:
            file, start, length = self._place(item)
            planner.load_bytes(item, io.BytesIO(self._view(file, start, length).read()))
        for read in reads:
            target = planner.resolve_tensor(read.item).detach()
            target.copy_(self._tensor(read))
            planner.commit_tensor(read.item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, item: ReadItem) -> tuple[str, int, int]:
        assert self.metadata.storage_data is not None
        place = self.metadata.storage_data[item.storage_index]
        return place.relative_path, place.offset, place.length

    def _read_of(self, item: ReadItem) -> _Read:
        about = self.metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(about, TensorStorageMetadata)
        chunk = next(chunk for chunk in about.chunks if chunk.offsets == item.storage_index.offset)
        return _Read(item, *self._place(item), tuple(chunk.sizes), about.properties.dtype.itemsize)

    def _bring(self, wanted: list[tuple[str, int, int]]) -> None:
        by_file: dict[str, list[Range]] = {}
        for file, start, length in wanted:
            by_file.setdefault(file, []).append((start, length))
        self.pieces.bring(by_file)

    def _view(self, file: str, start: int, length: int) -> BinaryIO:
        return cast(BinaryIO, _View(self.pieces.open(file), start, length))

    def _contents(self, read: _Read) -> Range | None:
        """Return where the elements lie in the archive of a tensor, `None` where its ends do not tell."""
        try:
            with ZipFile(self._view(read.file, *read.whole)) as archive:
                (record,) = [record for record in archive.infolist() if "/data/" in record.filename]
                # The directory names the header of a record, behind which name and padding lie before the contents.
                header = self._view(read.file, *read.whole)
                header.seek(record.header_offset)
                fixed = header.read(30)
        except (BadZipFile, ValueError, OSError):
            return None
        if record.header_offset + 30 > read.ends[0][1] or fixed[:4] != b"PK\x03\x04":
            return None
        ahead = int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")
        return record.header_offset + 30 + ahead, record.file_size

    def _tensor(self, read: _Read) -> Tensor:
        found = self._load(read)
        if not found.is_contiguous() or tuple(found.shape) != read.shape:
            # Its elements lie in another order than was thought.
            self._bring([(read.file, *read.whole)])
            found = self._load(read)
        return narrow_tensor_by_index(found, read.item.storage_offsets, read.item.lengths)

    def _load(self, read: _Read) -> Tensor:
        try:
            found: Tensor = torch.load(self._view(read.file, *read.whole), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointDamaged(
                f"Expected a readable entry. Received: {read.item.dest_index.fqn}, on which torch.load fails: {error}"
            ) from error
        return found


class _View(io.RawIOBase):
    """A stretch of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max((0, self._at, self._length)[whence] + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        rest = max(self._length - self._at, 0)
        count = rest if size is None or size < 0 else min(size, rest)
        self._file.seek(self._start + self._at)
        content = self._file.read(count)
        self._at += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
