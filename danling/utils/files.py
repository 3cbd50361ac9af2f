"""Small files that are whole or not there."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path


def write_atomically(path: Path, data: bytes | str) -> None:
    """Write a small file beside its place and move it there, so that a reader sees the old one or the new one.

    Args:
        path: Where it goes; its directory exists.
        data: Its contents.
    """
    raw = data.encode() if isinstance(data, str) else data
    staged = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    # 0666 less the umask, as any other file: not the 0600 of `tempfile`, and not more than the user allows.
    handle = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def json_text(value: object) -> str:
    """Return valid JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
