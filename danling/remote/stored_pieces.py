"""The files of a sharded checkpoint in a store, read in parts that are compared with the digests of their chunks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO

from danling.checkpoints.errors import CheckpointDamaged
from danling.checkpoints.shard_index import INDEX, ShardIndex

from .digests import ChunkDigests
from .errors import RemoteMissing
from .stored_run import Described, StoredRun

if TYPE_CHECKING:
    from danling.checkpoints.pieces import Range  # imports torch's distributed checkpoints, which cost a second

_AT_ONCE = 64 << 20


class StoredPieces:
    """The files of a target. What was read of them lies in files without a name, which go with this process.

    Args:
        run: The run in the store.
        found: The target.
    """

    def __init__(self, run: StoredRun, found: Described) -> None:
        self._run = run
        self._found = found
        self._files: dict[str, _Partial] = {}

    @cached_property
    def index(self) -> ShardIndex:
        """What lies where.

        Raises:
            CheckpointDamaged: If it is not what was written.
        """
        size = self._found.manifest.files[INDEX][0]
        self.bring({INDEX: [(0, size)]})
        try:
            return ShardIndex.parse(self.open(INDEX).read().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{self._run.key(self._found, INDEX)}: {error}") from error

    def bring(self, wanted: Mapping[str, Sequence[Range]]) -> None:
        """Read whole chunks that cover some ranges, as far as they are not here; see `Pieces.bring`."""
        for file, ranges in wanted.items():
            if file not in self._found.manifest.files:
                raise CheckpointDamaged(f"{INDEX} names {file}, which is no part of {self._found.target}")
            self._partial(file).bring(ranges)

    def open(self, file: str) -> BinaryIO:
        """Return a file; see `Pieces.open`."""
        content = self._partial(file).content
        content.seek(0)
        return content

    def close(self) -> None:
        """Remove what was brought."""
        for partial in self._files.values():
            partial.content.close()
        self._files.clear()

    def _partial(self, file: str) -> _Partial:
        if file not in self._files:
            self._files[file] = _Partial(self._run, self._found, file)
        return self._files[file]


class _Partial:
    def __init__(self, run: StoredRun, found: Described, file: str) -> None:
        self._store = run.store
        self._key = f"{run.layout.checkpoints}/{run.key(found, file)}"
        self._size = found.manifest.files[file][0]
        self._digests = _digests(run, found, file)
        self._there: set[int] = set()
        self.content: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed with the pieces
        os.truncate(self.content.fileno(), self._size)

    def bring(self, ranges: Iterable[Range]) -> None:
        numbers = {n for start, length in ranges if length for n in self._covering(start, length)} - self._there
        batch: list[Range] = []
        for span in self._spans(sorted(numbers)):
            batch.append(span)
            if sum(length for _, length in batch) >= _AT_ONCE:
                self._fetch(batch)
                batch = []
        self._fetch(batch)

    def _covering(self, start: int, length: int) -> range:
        if start + length > self._size:
            raise CheckpointDamaged(f"{self._key} has {self._size} bytes, of which {start + length} are named")
        return range(start // self._digests.chunk, -(-(start + length) // self._digests.chunk))

    def _spans(self, numbers: Sequence[int]) -> list[Range]:
        """Return the ranges of chunks; neighbours are one, up to a size."""
        chunk = self._digests.chunk
        spans: list[Range] = []
        for number in numbers:
            start, end = number * chunk, min((number + 1) * chunk, self._size)
            if spans and sum(spans[-1]) == start and spans[-1][1] + chunk <= _AT_ONCE // 4:
                spans[-1] = (spans[-1][0], end - spans[-1][0])
            else:
                spans.append((start, end - start))
        return spans

    def _fetch(self, spans: Sequence[Range]) -> None:
        for (start, length), content in zip(spans, self._store.get_ranges(self._key, spans)):
            if len(content) != length:
                raise CheckpointDamaged(f"{self._key} has {len(content)} bytes at {start} instead of {length}")
            try:
                self._digests.check(start, content)
            except CheckpointDamaged as error:
                raise CheckpointDamaged(f"{self._key}: {error}") from error
            os.pwrite(self.content.fileno(), content, start)
            self._there.update(self._covering(start, length))


def _digests(run: StoredRun, found: Described, file: str) -> ChunkDigests:
    assert found.target is not None
    key = run.layout.digests(found.target, file)
    try:
        digests = ChunkDigests.parse(run.store.get(key).decode("ascii", "replace"))
    except RemoteMissing as error:
        raise CheckpointDamaged(f"{key} is missing") from error
    except CheckpointDamaged as error:
        raise CheckpointDamaged(f"{key}: {error}") from error
    if digests.size != found.manifest.files[file][0]:
        raise CheckpointDamaged(f"{key} describes {digests.size} bytes instead of {found.manifest.files[file][0]}")
    return digests
