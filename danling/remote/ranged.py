"""A file in a store that is read in parts: what is not asked for is not moved."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType

from danling.checkpoints.archive import archive_complaints
from danling.checkpoints.errors import CheckpointDamaged

from .store import RemoteStore

_BLOCK = 64 << 10


class RangedFile(io.RawIOBase):
    """A seekable stream of an object, whose parts are kept in a file on the disk at the places that they have in the object.

    Args:
        store: A client.
        key: The key of the object.
        size: Its size in bytes.
        path: The file, which is made: as large as the object, and empty but for what was read.
    """

    def __init__(self, store: RemoteStore, key: str, size: int, path: Path) -> None:
        self._store, self._key, self._size = store, key, size
        self._place = 0
        self._there: set[int] = set()
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        os.truncate(self._handle, size)

    def readable(self) -> bool:
        """Whether it can be read: it can."""
        return True

    def seekable(self) -> bool:
        """Whether it can be sought in: it can."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(start + offset, 0)
        return self._place

    def tell(self) -> int:
        """Return the place."""
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Return bytes from the place on."""
        end = self._size if size is None or size < 0 else min(self._place + size, self._size)
        if end <= self._place:
            return b""
        self._fetch(self._place, end)
        content = os.pread(self._handle, end - self._place, self._place)
        self._place = end
        return content

    def _fetch(self, start: int, end: int) -> None:
        missing = [n for n in range(start // _BLOCK, -(-end // _BLOCK)) if n not in self._there]
        if not missing:
            return
        first, last = missing[0] * _BLOCK, min((missing[-1] + 1) * _BLOCK, self._size)
        (content,) = self._store.get_ranges(self._key, [(first, last - first)])
        os.pwrite(self._handle, content, first)
        self._there.update(range(missing[0], missing[-1] + 1))

    def close(self) -> None:
        """Let go of the file, which stays."""
        if not self.closed:
            os.close(self._handle)
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def without_tensors(store: RemoteStore, key: str, size: int, path: Path) -> None:
    """Make a file that has everything of a file of `torch.save` in a store but the contents of its tensors.

    Args:
        store: A client.
        key: The key of the object.
        size: Its size in bytes.
        path: The file.

    Raises:
        CheckpointDamaged: If a record that was brought has another CRC-32 than was written.
    """
    with RangedFile(store, key, size, path) as file:
        problems = archive_complaints(file, tensors=False)  # type: ignore[arg-type]
    if problems:
        raise CheckpointDamaged(f"{key}: {'; '.join(problems)}")
