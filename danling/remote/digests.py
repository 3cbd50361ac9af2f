"""Digests of the chunks of a file, by which a part of it can be checked that was read alone.

The object `checkpoints/digests/<target>/<file>` is text: a line `<size in bytes> <chunk size in bytes>`, then the SHA-256 of each chunk in
hexadecimal, a line each. The last chunk may be shorter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from danling.checkpoints import storage
from danling.checkpoints.errors import CheckpointDamaged

CHUNK = 256 << 10
"""Bytes of a chunk."""


@dataclass(frozen=True)
class ChunkDigests:
    """Digests of the chunks of a file.

    Attributes:
        size: Size of the file in bytes.
        chunk: Bytes of a chunk; the last one may have fewer.
        digests: SHA-256 of each chunk, in hexadecimal.
    """

    size: int
    chunk: int
    digests: tuple[str, ...]

    def text(self) -> str:
        """Return what is stored."""
        return "\n".join([f"{self.size} {self.chunk}", *self.digests]) + "\n"

    @classmethod
    def parse(cls, text: str) -> ChunkDigests:
        """Read what `text` returns.

        Raises:
            CheckpointDamaged: If it is cut or something else.
        """
        try:
            first, *digests = text.splitlines()
            size, chunk = (int(number) for number in first.split())
            if len(digests) != -(-size // chunk) or any(len(digest) != 64 for digest in digests):
                raise ValueError("it is cut")
        except (ValueError, ZeroDivisionError) as error:
            raise CheckpointDamaged(f"Expected digests of the chunks of a file. Received: {error}.") from error
        return cls(size, chunk, tuple(digests))

    def check(self, start: int, content: bytes | memoryview) -> None:
        """Compare whole chunks with their digests.

        Args:
            start: Where the content begins in the file: at the begin of a chunk.
            content: Bytes that end at the end of a chunk, or of the file.

        Raises:
            CheckpointDamaged: If they differ.
        """
        view = memoryview(content)
        for place in range(0, len(view), self.chunk):
            number = (start + place) // self.chunk
            if hashlib.sha256(view[place : place + self.chunk]).hexdigest() != self.digests[number]:
                raise CheckpointDamaged(f"bytes {start + place} and following have another SHA-256 than was written")


def digest_file(path: Path) -> tuple[str, ChunkDigests]:
    """Return the SHA-256 of a file, and the digests of its chunks, in one pass.

    Args:
        path: A regular file.
    """
    whole, part, digests, size = hashlib.sha256(), hashlib.sha256(), [], 0
    for piece in storage.chunks(path, CHUNK):
        whole.update(piece)
        while piece:
            # A read may return less than it was asked for.
            now = piece[: CHUNK - size % CHUNK]
            part.update(now)
            size, piece = size + len(now), piece[len(now) :]
            if size % CHUNK == 0:
                digests.append(part.hexdigest())
                part = hashlib.sha256()
    if size % CHUNK:
        digests.append(part.hexdigest())
    return whole.hexdigest(), ChunkDigests(size, CHUNK, tuple(digests))
