"""The log of a run: one file on the main process, lines on the console, the root logger left alone."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

_LOGGER = logging.getLogger("danling")


class RunLog:
    """The handlers of one run on the library's logger.

    Attributes:
        handlers: What was added, to be taken off again.
    """

    def __init__(self) -> None:
        self.handlers: list[logging.Handler] = []
        self.level_before = _LOGGER.level


def open_run_log(file: Path | None, *, is_main: bool) -> RunLog:
    """Add a console handler and, on the main process, a file handler to the logger `danling`.

    Other processes show warnings and errors only.

    Args:
        file: The log file, or `None` for none.
        is_main: Whether this is the main process.
    """
    log = RunLog()
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.INFO if is_main else logging.WARNING)
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers.append(console)
    if file is not None and is_main:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.handlers.append(handler)
    for added in log.handlers:
        _LOGGER.addHandler(added)
    if _LOGGER.getEffectiveLevel() > logging.INFO:
        _LOGGER.setLevel(logging.INFO)
    return log


def close_run_log(log: RunLog) -> None:
    """Take the handlers off and close the file."""
    for handler in log.handlers:
        _LOGGER.removeHandler(handler)
        handler.close()
    _LOGGER.setLevel(log.level_before)
