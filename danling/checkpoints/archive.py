"""The checksums inside a file of `torch.save`: a zip archive has the CRC-32 of each of its records, which `torch.load` does not compare."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from . import storage

_CHUNK = 4 << 20
_MAGIC = b"PK\x03\x04"


def is_archive(path: Path) -> bool:
    """Whether a file begins as an archive does; files of `torch.save` before 1.6 are none, and have no checksums inside."""
    with _opened(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def archive_complaints(source: Path | BinaryIO, *, tensors: bool = True, required: bool = True) -> list[str]:
    """Return what is wrong with the records of an archive; empty when each has its CRC-32."""
    try:
        with _opened(source) as file, ZipFile(file) as archive:
            records = archive.infolist()
            if not any(record.CRC for record in records):
                return ["it has no CRC-32 of its records"] if required else []
            read = [record for record in records if tensors or "/data/" not in record.filename]
            found = [_complaint(archive, record) for record in read]
    # zipfile raises what its parts raise: struct.error, UnicodeDecodeError, NotImplementedError, ...
    except Exception as error:
        return [f"it is no whole archive ({error})"]
    return [problem for problem in found if problem is not None]


def oversized(path: Path, size: int) -> str | None:
    """Return in which way the records of an archive are larger than the file, as compressed ones and those that overlap; `None` in none."""
    try:
        with _opened(path) as file, ZipFile(file) as archive:
            records = archive.infolist()
    except Exception as error:
        return f"which is no whole archive ({error})"
    if any(record.compress_type != ZIP_STORED for record in records):
        return "whose records are compressed, which torch never does"
    total = sum(record.file_size for record in records)
    return f"whose records have {total} bytes and the file {size}" if total > size else None


def _opened(source: Path | BinaryIO) -> AbstractContextManager[BinaryIO]:
    return os.fdopen(storage.open_regular(source), "rb") if isinstance(source, Path) else nullcontext(source)


def _complaint(archive: ZipFile, record: ZipInfo) -> str | None:
    if record.compress_type != ZIP_STORED:
        return f"its record {record.filename} is compressed, which torch never does"
    try:
        with archive.open(record) as content:
            while content.read(_CHUNK):
                pass
    except BadZipFile:
        return f"its record {record.filename} has another CRC-32 than was written"
    return None
