"""Where curves go: a JSONL file that needs no package and is always there, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from danling.utils.files import open_file, write_all, write_error
from danling.utils.plain import parse_json

PathLike = str | os.PathLike[str]

logger = logging.getLogger("danling")

RunStatus = Literal["running", "finished", "failed", "preempted", "interrupted"]
"""What a run is: it trains, has ended by itself, has failed, or was stopped by SIGTERM or SIGUSR1, or by SIGINT."""

_OWN_NAMES = ("step", "time", "ranks")
"""Entries of a line of metrics.jsonl other than metrics."""

_LONGEST_LINE = 16 << 20
_LARGEST_FILE = 4 << 30
_MOST_VALUES = 10_000_000

_STATUS_OF_EXIT_CODES: Mapping[object, RunStatus] = {
    None: "finished",
    0: "finished",
    143: "preempted",
    130: "interrupted",
}


class Tracker(Protocol):
    """A place for curves, opened on the main process only.

    One that has a method `set_status(status)` too is told what the run is, a `RunStatus`: when a training begins, and how it ends.
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record figures.

        Args:
            values: Metrics by name, usually `split/name`.
            step: Global step: optimizer updates committed.
        """
        ...

    def flush(self) -> None:
        """Put what was recorded where a killed process cannot lose it; called when a checkpoint is saved."""
        ...

    def close(self) -> None:
        """Write pending values and close files and processes. A second call does nothing."""
        ...


class TrackerSet:
    """The trackers of a run: each is opened once, gets every metric, and is flushed and closed with the others.

    Args:
        is_main: Whether this process sends figures. Others open none, and only close what they were given.

    Examples:
        >>> from danling.reporting import JsonlTracker
        >>> trackers = TrackerSet(is_main=True)
        >>> trackers.add(lambda: JsonlTracker("metrics.jsonl"))
        >>> trackers.opened
        []
    """

    def __init__(self, *, is_main: bool) -> None:
        self.is_main = is_main
        self.is_open = False
        self.opened: list[Tracker] = []
        """What metrics are sent to."""
        self._added: list[Any] = []
        self._status: RunStatus | None = None

    def add(self, tracker: Tracker | Callable[[], Tracker]) -> None:
        """Take in a tracker, or something to call for one when the set is opened; at once, when it is open.

        Args:
            tracker: The tracker, its class, or a function that returns it.

        Raises:
            TypeError: If it is neither a tracker nor callable.
            ValueError: If it was added before.
        """
        if _lacks(tracker) and not callable(tracker):
            raise TypeError(
                f"Expected a tracker, which has the methods log(values, step), flush() and close(). Received: {tracker!r} without "
                f"{_lacks(tracker)}. Add them, or pass a function that returns such an object."
            )
        if any(tracker is other for other in self._added):
            raise ValueError(f"Expected a tracker that is not there yet. Received: {tracker!r} twice. Add it once.")
        self._added.append(tracker)
        if self.is_open:
            self._open(tracker)

    def open(self) -> None:
        """Open the trackers added so far; later ones are opened at once. A second call does nothing."""
        if not self.is_open:
            self.is_open = True
            for tracker in self._added:
                self._open(tracker)

    def _open(self, tracker: Any) -> None:
        if not self.is_main:
            return
        made = tracker() if _lacks(tracker) else tracker
        if _lacks(made):
            raise TypeError(
                "Expected a function that returns a tracker, with the methods log(values, step), flush() and close(). Received: "
                f"{tracker!r}, which returned {made!r}. Return the tracker."
            )
        self.opened.append(made)

    def log(self, values: Mapping[str, float], step: int, *, beside: Mapping[str, object] | None = None) -> None:
        """Send metrics to every tracker.

        Args:
            values: Metrics by name, usually `split/name`.
            step: Global step: optimizer updates committed.
            beside: Plain values that are no numbers, for the file of metrics alone.
        """
        for tracker in self.opened:
            # One of the user's own that is derived from it, and takes the numbers in another way, gets these alone.
            if beside and isinstance(tracker, JsonlTracker) and type(tracker).log is JsonlTracker.log:
                tracker.log_with(values, step, beside)
            else:
                tracker.log(values, step)

    def flush(self) -> None:
        """Flush every tracker; one that fails does not keep the others from it, and the first failure is raised."""
        with ExitStack() as stack:
            for tracker in reversed(self.opened):
                stack.callback(tracker.flush)

    def set_status(self, status: RunStatus) -> None:
        """Tell what the run is to every tracker that takes it; one that fails at it is logged. What was told is not told again.

        Args:
            status: What it is now.
        """
        if status == self._status:
            return
        self._status = status
        for tracker in self.opened:
            tell: Callable[[RunStatus], None] | None = getattr(tracker, "set_status", None)
            if callable(tell):
                try:
                    tell(status)
                except Exception:
                    logger.exception("A tracker could not be told that the run is %s.", status)

    def set_status_after(self, error: BaseException) -> None:
        """Give the status of a run that an exception has ended to every tracker that takes it; `SystemExit` gives its code."""
        if isinstance(error, SystemExit):
            # Of anything else than a number Python prints it and ends with 1.
            code = error.code if error.code is None or isinstance(error.code, int) else 1
            self.set_status(_STATUS_OF_EXIT_CODES.get(code, "failed"))
        else:
            self.set_status("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")

    @contextmanager
    def telling_status(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: the trackers are told that the run is running, and then how it ended.

        Args:
            whole: Whether the run has ended where nothing is raised.
        """
        self.set_status("running")
        try:
            yield
        except BaseException as error:
            self.set_status_after(error)
            raise
        if whole:
            self.set_status("finished")

    def close(self) -> None:
        """Close every tracker; one that fails does not keep the others from it. A second call does nothing."""
        given = [tracker for tracker in self._added if not _lacks(tracker) and tracker not in self.opened]
        closing, self.opened, self._added = [*self.opened, *given], [], []
        with ExitStack() as stack:
            for tracker in reversed(closing):
                stack.callback(tracker.close)


def _lacks(tracker: object) -> str:
    """Return the methods of a tracker that something lacks. A class has them too, but is called for an object of it."""
    names = ("log", "flush", "close")
    return ", ".join(n for n in names if isinstance(tracker, type) or not callable(getattr(tracker, n, None)))


class JsonLines:
    """A file of JSON objects with a `step`, one a line, which all attempts of a run share.

    At the first `write`, what an earlier attempt wrote after the step that the run resumes from is cut off, and so is a line that a kill
    left unfinished: every step is there once. A line is handed to the operating system before `write` returns, so that a killed process
    loses none.

    Args:
        file: The file; its directory is created at the first line.
        resume_step: Global step of the checkpoint that the run resumes from; 0 or `None` starts the file anew.
    """

    def __init__(self, file: PathLike, *, resume_step: int | None = None) -> None:
        self.file = Path(file)
        self._resume_step: int | None = resume_step or 0
        self._handle: int | None = None

    def write(self, line: Mapping[str, object]) -> None:
        """Append an object."""
        content = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            if self._handle is None:
                self._handle = self._open()
            before = os.fstat(self._handle).st_size
            try:
                write_all(self._handle, content)
            except OSError:
                with suppress(OSError):  # the next line must not be joined to the part that was written
                    os.ftruncate(self._handle, before)
                raise
        except OSError as error:
            raise write_error("a line", self.file, error) from error

    def close(self) -> None:
        """Close the file. A line after it opens it again and appends."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self.file.exists() and self._resume_step is not None:
            _cut_back(self.file, self._resume_step)
        # What this attempt has written is never cut.
        self._resume_step = None
        return os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)


class JsonlTracker(JsonLines):
    """Writes one JSON object a line: `{"step": 10, "time": 1767225600.0, "train/loss": 0.5}`.

    An attempt that logs nothing, since it only evaluates, leaves the file alone. `time` is in seconds since 1970; NaN and infinities are
    `null`.
    """

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append one line.

        Raises:
            ValueError: If a metric is called `step`, `time` or `ranks`.
        """
        self.log_with(values, step, {})

    def log_with(self, values: Mapping[str, float], step: int, beside: Mapping[str, object]) -> None:
        """Append one line that also has plain values under other names than metrics."""
        for name in _OWN_NAMES:
            if name in values:
                raise ValueError(
                    "Expected names of metrics other than 'step', 'time' and 'ranks', which every line of metrics.jsonl has. "
                    f"Received: values={dict(values)}. Rename {name!r}, for example to 'train/{name}'."
                )
        numbers = {name: float(value) for name, value in values.items()}
        figures = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.write({"step": int(step), "time": round(time.time(), 3), **figures, **beside})

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""


def read_jsonl(file: PathLike) -> list[dict[str, object]]:
    """Return the lines of a JSONL file that are complete; one that a kill left unfinished is skipped.

    Args:
        file: A file of `JsonlTracker`.

    Raises:
        OSError: If it cannot be opened, or is no regular file.
        ValueError: If it has more than 4 GiB, or more than 10,000,000 values.
    """
    records, values = [], 0
    with open_file(file) as lines:
        if os.fstat(lines.fileno()).st_size > _LARGEST_FILE:
            raise ValueError(
                f"Expected a file of at most {_LARGEST_FILE:,} bytes. Received: {str(file)!r}, which is larger."
            )
        for line in bounded_lines(lines):
            values += 1 + line.count(b",") + line.count(b"[") + line.count(b"{")
            if values > _MOST_VALUES:
                raise ValueError(f"Expected at most {_MOST_VALUES:,} values. Received: {str(file)!r}, which has more.")
            record = _parse(line)
            if record is not None:
                records.append(record)
    return records


def bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the whole lines of a file; those of more than 16 MiB are left out."""
    is_rest = False
    while line := file.readline(_LONGEST_LINE):
        is_whole = line.endswith(b"\n")
        if is_whole and not is_rest:
            yield line
        is_rest = not is_whole


def _cut_back(file: Path, resume_step: int) -> None:
    staged = file.with_name(f".{file.name}.tmp")
    with open_file(file) as old, open(staged, "wb") as new:
        for line in bounded_lines(old):
            record = _parse(line)
            if record is not None and resume_step > 0 and record["step"] <= resume_step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(staged, file)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
