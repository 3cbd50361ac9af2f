"""What the ranks of one machine under torchrun leave for each other when they fail; no torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names the file in which torchrun looks for the error of a rank."""


def shown_by_torchrun() -> bool:
    """Return whether torchrun has started this process, and shows its error at the end."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def first_failure(error: Exception) -> str | None:
    """Return what the rank of this machine that failed first under torchrun says of it, `None` on that rank itself.

    Args:
        error: What this rank failed with.
    """
    if not shown_by_torchrun():
        return None
    # One directory for each attempt, with one below it for each rank.
    marker = Path(os.environ[ERROR_FILE]).parent.parent / "first-failure"
    try:
        with marker.open("x", encoding="utf-8") as file:
            file.write(f"{os.environ.get('RANK', '?')} {headline_of(error)}")
        return None
    except FileExistsError:
        return marker.read_text(encoding="utf-8")
    except OSError:
        return None


def headline_of(error: BaseException) -> str:
    """Return the one line that an error is known by."""
    return f"{type(error).__name__}: {error}"
