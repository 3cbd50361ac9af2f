"""The log of a run, and lines on the terminal that do not tear an open progress bar; `print` and the root logger are left alone."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

LOGGER = logging.getLogger("danling")
SHOWN_ON_BAR = "shown_on_bar"
"""Attribute of records that a progress bar shows as well: the console skips them while a bar is open, the file never."""

_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONSOLE_FORMAT = "%(asctime)s %(message)s"
_lock = threading.Lock()
_open_bars: list[Any] = []
"""Bars that are drawn; each has `external_write_mode` of tqdm, a context in which the bar is cleared."""
_open_logs: list[RunLog] = []
_speaking: ContextVar[RunLog | None] = ContextVar("danling_speaking", default=None)


class RunLog:
    """What `open_run_log` opened, for `close_run_log` to close."""

    def __init__(self, console: logging.Handler, file_handler: logging.FileHandler | None) -> None:
        self.console = console
        self.file_handler = file_handler
        self.level_before = LOGGER.level
        if file_handler is not None:
            file_handler.addFilter(lambda record: _speaking.get() in (None, self))

    @property
    def file(self) -> Path | None:
        """Path of the log file, `None` when there is none."""
        return Path(self.file_handler.baseFilename) if self.file_handler is not None else None


class ConsoleHandler(logging.Handler):
    """Writes to the current `sys.stderr`, above an open progress bar.

    It is silent where the program has configured the root logger to write to the terminal: the line is there already.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        prefix = "" if rank is None else f"[rank {rank}] "
        self.setFormatter(logging.Formatter(prefix + _CONSOLE_FORMAT, datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, with its level in front when it is a warning or worse."""
        if (_open_bars and getattr(record, SHOWN_ON_BAR, False)) or _root_writes_to_terminal():
            return
        try:
            text = self.format(record)
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname}: {text}"
            stream = sys.stderr
            with beside_bar(stream):
                stream.write(text + "\n")
                stream.flush()
        except (AttributeError, OSError, TypeError, ValueError):
            self.handleError(record)


def open_run_log(
    file: str | os.PathLike[str] | None,
    *,
    is_main: bool = True,
    rank: int | None = None,
    level: int = logging.INFO,
) -> RunLog:
    """Let the `danling` logger speak: on the console, and into `file`. The root logger is left alone.

    On the main process the console shows `level` and above. On the others it shows warnings and errors only, with the
    rank in front, and no file is written.

    Args:
        file: The log file, appended to; its directory is created. `None` writes none.
        is_main: Whether this process is the main one.
        rank: Rank of this process, named in its lines when it is not the main one.
        level: Lowest level of the file and of the main process's console.

    Returns:
        A handle for `close_run_log`. Runs that are open at the same time share one console.

    Raises:
        OSError: If the file cannot be opened; nothing stays open then.
    """
    file_handler = None
    if file is not None and is_main:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        file_handler = logging.FileHandler(file, encoding="utf-8")
        file_handler.setLevel(level)
        file_handler.setFormatter(logging.Formatter(_FILE_FORMAT))
    with _lock:
        log = RunLog(_shared_console(is_main, rank, level), file_handler)
        if file_handler is not None:
            LOGGER.addHandler(file_handler)
        LOGGER.addHandler(log.console)
        # Handlers that the program has given to the root logger are kept quiet on other ranks by the logger itself.
        lowest = level if is_main else max(level, logging.WARNING)
        if LOGGER.level == logging.NOTSET or LOGGER.level > lowest:
            LOGGER.setLevel(lowest)
        _open_logs.append(log)
    return log


@contextmanager
def speaking_for(log: RunLog) -> Iterator[None]:
    """Keep lines that are written in this context, such as those of a training, out of the files of other runs that are open."""
    token = _speaking.set(log)
    try:
        yield
    finally:
        _speaking.reset(token)


def close_run_log(log: RunLog) -> None:
    """Close what `open_run_log` opened; a second call does nothing. With the last one, the logger's level is put back.

    Args:
        log: The handle.
    """
    with _lock:
        if log not in _open_logs:
            return
        oldest = _open_logs[0]
        _open_logs.remove(log)
        if log.file_handler is not None:
            LOGGER.removeHandler(log.file_handler)
            log.file_handler.close()
        if all(other.console is not log.console for other in _open_logs):
            LOGGER.removeHandler(log.console)
        if _open_logs:
            # Closed out of order, the oldest log hands on the level that was there before any of them.
            _open_logs[0].level_before = oldest.level_before
        else:
            LOGGER.setLevel(log.level_before)


def _shared_console(is_main: bool, rank: int | None, level: int) -> logging.Handler:
    if _open_logs:
        return _open_logs[-1].console
    console = ConsoleHandler(rank=None if is_main else rank)
    console.setLevel(level if is_main else logging.WARNING)
    return console


def _root_writes_to_terminal() -> bool:
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
    return LOGGER.propagate and any(stream in (sys.stderr, sys.stdout) for stream in streams if stream is not None)


def bar_opened(bar: Any) -> None:
    """Register a bar that is drawn from now on."""
    _open_bars.append(bar)


def bar_closed(bar: Any) -> None:
    """Forget a bar; one that is not registered is ignored."""
    if bar in _open_bars:
        _open_bars.remove(bar)


def beside_bar(stream: TextIO) -> AbstractContextManager[object]:
    """Return a context in which `stream` can be written without tearing an open bar."""
    return _open_bars[-1].external_write_mode(file=stream) if _open_bars else nullcontext()


class Printer:
    """A `print` that speaks on one process only and does not tear the progress bar.

    Args:
        enabled: Whether this process speaks; usually the main one does.

    Examples:
        >>> say = Printer(enabled=rank == 0)  # doctest: +SKIP
        >>> say("loss", 0.5)  # doctest: +SKIP
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled

    def __call__(
        self, *values: object, sep: str | None = " ", end: str | None = "\n", file: Any = None, flush: bool = False
    ) -> None:
        """Print as the builtin does, with its arguments; silent when not enabled."""
        if not self.enabled:
            return
        stream = file if file is not None else sys.stdout
        with beside_bar(stream):
            print(*values, sep=sep, end=end, file=stream, flush=flush)
