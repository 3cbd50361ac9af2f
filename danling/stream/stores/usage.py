"""Bytes of files that several processes add and remove: counted without looking at all of them, and right after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from danling.utils.files import read_text
from danling.utils.nesting import parse_json


class UsageCount:
    """The bytes of the files below a directory, in a small file of its own.

    A change is announced before it is made, with the files that it is about. Whoever reads the count after a kill between the two
    finds out from the disk whether it was made. All methods need the lock of the store.

    Args:
        file: The small file.
        directory: What is counted, two levels deep.
    """

    def __init__(self, file: Path, directory: Path) -> None:
        self._file = file
        self._directory = directory

    def read(self) -> int:
        """Return the bytes; they are counted anew where the small file cannot be read."""
        try:
            found = parse_json(read_text(self._file))
            settled, pending = int(found["bytes"]), dict(found["pending"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return self.recount()
        return settled + sum(int(size) for name, size in pending.items() if (self._directory / name).exists())

    def write(self, settled: int, pending: Mapping[str, int] | None = None) -> None:
        """Keep a count.

        Args:
            settled: Bytes without the files that are about to appear or to go.
            pending: Sizes of those, by their paths below the directory.
        """
        text = json.dumps({"bytes": settled, "pending": dict(pending or {})}).encode()
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # Neither atomic nor durable: what is cut short is no JSON, and is counted anew, as at the first use in each process.
            os.pwrite(handle, text, 0)
            os.ftruncate(handle, len(text))
        finally:
            os.close(handle)

    def recount(self) -> int:
        """Return the bytes of all files, found on the disk."""
        total = 0
        with os.scandir(self._directory) as folders:
            for folder in folders:
                if folder.is_dir():
                    total += _bytes_of_files(folder.path)
        return total


def _bytes_of_files(folder: str) -> int:
    total = 0
    with os.scandir(folder) as files:
        for file in files:
            try:
                total += file.stat().st_size
            except FileNotFoundError:  # a reader without the lock may meet one that goes
                continue
    return total
