"""The log of a run, and lines on the terminal that do not tear an open progress bar; `print` and the root logger are left alone."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from .progress import Progress

LOGGER = logging.getLogger("danling")
SHOWN_ON_BAR = "shown_on_bar"
"""Attribute of records that a progress bar shows as well: the console skips them while a bar is open, the file never."""

_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONSOLE_FORMAT = "%(asctime)s %(message)s"
_lock = threading.Lock()
open_bars: list[Progress] = []
"""Bars that are drawn."""
_open_logs: list[RunLog] = []
_speaking: ContextVar[RunLog | None] = ContextVar("danling_speaking", default=None)


class RunLog:
    """Lets the `danling` logger speak: on the console, and into a file. Runs that are open at the same time share one console.

    On the main process the console shows information and warnings. On the others it shows warnings and errors only, with the rank in
    front, and no file is written.

    Args:
        file: The log file, appended to; its directory is created. `None` writes none.
        is_main: Whether this process is the main one.
        rank: Rank of this process.
        early: Records that the file begins with, which the console has shown.

    Raises:
        OSError: If the file cannot be opened; nothing stays open then.
    """

    _level_before = logging.NOTSET
    """Level of the logger before the first of the open logs."""

    def __init__(
        self,
        file: str | os.PathLike[str] | None,
        *,
        is_main: bool = True,
        rank: int = 0,
        early: Iterable[logging.LogRecord] = (),
    ) -> None:
        level = logging.INFO if is_main else logging.WARNING
        self.file_handler: logging.FileHandler | None = None
        if file is not None and is_main:
            self.file_handler = self._opened(file)
            for record in early:
                self.file_handler.handle(record)
        with _lock:
            # Runs that are open together share one console, or each line would come twice.
            if _open_logs:
                self._console: ConsoleHandler = _open_logs[-1]._console
            else:
                RunLog._level_before = LOGGER.level
                self._console = ConsoleHandler(None if is_main else rank)
            self._console.setLevel(level)
            LOGGER.addHandler(self._console)
            # Handlers that the program has given to the root logger are kept quiet on other ranks by the logger itself.
            if LOGGER.level == logging.NOTSET or LOGGER.level > level:
                LOGGER.setLevel(level)
            _open_logs.append(self)

    def _opened(self, file: str | os.PathLike[str]) -> logging.FileHandler:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
        handler.setLevel(logging.INFO)
        handler.setFormatter(logging.Formatter(_FILE_FORMAT))
        # A line that no run speaks, such as a warning of a library, is in the files of all.
        handler.addFilter(lambda record: _speaking.get() in (None, self))
        LOGGER.addHandler(handler)
        return handler

    def become_main(self, file: str | os.PathLike[str] | None) -> None:
        """Speak as the log of the main process does, which this one has become."""
        with _lock:
            if file is not None and self.file_handler is None:
                self.file_handler = self._opened(file)
            self._console.setLevel(logging.INFO)
            self._console.setFormatter(logging.Formatter(_CONSOLE_FORMAT, datefmt="%H:%M:%S"))
            if LOGGER.level > logging.INFO:
                LOGGER.setLevel(logging.INFO)

    @contextmanager
    def speaking(self) -> Iterator[None]:
        """Keep lines that are written in this context, such as those of a training, out of the files of other runs that are open."""
        token = _speaking.set(self)
        try:
            yield
        finally:
            _speaking.reset(token)

    def close(self) -> None:
        """Close the file, and with the last log the console; a second call does nothing."""
        with _lock:
            if self not in _open_logs:
                return
            _open_logs.remove(self)
            if self.file_handler is not None:
                LOGGER.removeHandler(self.file_handler)
                self.file_handler.close()
            if not _open_logs:
                LOGGER.removeHandler(self._console)
                LOGGER.setLevel(RunLog._level_before)


class EarlyLog(logging.Handler):
    """Shows what a construction warns of before the log of its run is open, as the log will, and keeps it for the file of that log.

    Args:
        rank: Rank of this process, `None` on the main one.
    """

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self._console = ConsoleHandler(rank)
        LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, unless it belongs to another run, and show it where no open log does."""
        if _speaking.get() is None:
            self.records.append(record)
        if not _open_logs:
            self._console.emit(record)

    def end(self) -> list[logging.LogRecord]:
        """Listen no more, and return what was kept. A second call returns nothing."""
        LOGGER.removeHandler(self)
        records, self.records = self.records, []
        return records


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
        streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
        is_shown_by_root = LOGGER.propagate and any(
            stream in (sys.stderr, sys.stdout) for stream in streams if stream
        )
        if is_shown_by_root or (open_bars and getattr(record, SHOWN_ON_BAR, False)):
            return
        # As handlers of the standard library do: a terminal that is gone must not end a training.
        try:
            text = self.format(record)
            if record.levelno >= logging.WARNING:
                text = f"{record.levelname}: {text}"
            with beside_bar(sys.stderr) as stream:
                stream.write(text + "\n")
                stream.flush()
        except (AttributeError, OSError, TypeError, ValueError):
            self.handleError(record)


@contextmanager
def beside_bar(stream: TextIO) -> Iterator[TextIO]:
    """Return a context in which a stream can be written without tearing an open bar."""
    bars = list(open_bars)
    for bar in bars:
        bar.erase()
    yield stream
    # The text must be on the terminal before the bar is drawn below it.
    if bars:
        stream.flush()
    for bar in bars:
        bar.draw(at_once=True)
