"""What the ranks of one machine under torchrun leave for each other when they fail; no torch is imported."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable that names the file in which torchrun looks for the error of a rank."""


def shown_by_torchrun() -> bool:
    """Return whether torchrun has started this process, and shows its error at the end."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


class FirstFailure(NamedTuple):
    """What is known of the rank of this machine that failed first."""

    rank: str
    second: int
    """Time of its failure, in whole seconds since 1970."""
    headline: str
    """The line that its error is known by."""


def first_failure(error: BaseException) -> tuple[FirstFailure, bool]:
    """Return which rank of this machine failed first under torchrun, and whether it is this one.

    A process that torchrun has not started is its own first rank.
    """
    own = FirstFailure(os.environ.get("RANK", "?"), int(time.time()), headline_of(error))
    if not shown_by_torchrun():
        return own, True
    # One directory for each attempt, with one below it for each rank.
    marker = Path(os.environ[ERROR_FILE]).parent.parent / "first-failure"
    staged = marker.with_name(f"{marker.name}.{os.getpid()}")
    try:
        staged.write_text(json.dumps(own), encoding="utf-8")
        # The name appears together with its content: a rank that fails at the same time finds nothing or all of it.
        os.link(staged, marker)
        return own, True
    except FileExistsError:
        return FirstFailure(*json.loads(marker.read_text(encoding="utf-8"))), False
    except OSError:
        return own, True
    finally:
        with suppress(OSError):
            staged.unlink()


def headline_of(error: BaseException) -> str:
    """Return the one line that an error is known by."""
    return f"{type(error).__name__}: {error}"
