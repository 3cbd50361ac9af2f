"""Which functions of the library are called while something runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def calls_into(*parts: str) -> Iterator[list[str]]:
    """Yield a list that takes the names of the functions of this thread that are called in files with one of these parts in their path."""
    called: list[str] = []

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in parts):
            called.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(None)
