"""What metrics.jsonl holds: how lines of JSON are appended, cut back to the save that a run resumes from, and read."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from danling.utils.files import open_file, replacing, write_all, write_error
from danling.utils.plain import parse_json

logger = logging.getLogger("danling")

PathLike = str | os.PathLike[str]

_OWN_NAMES = ("step", "time", "ranks")
"""Entries of a line of metrics.jsonl other than metrics."""

# Bounds of what is read: the file may be one of another person.
_LONGEST_LINE = 16 << 20
_LARGEST_FILE = 4 << 30
_MOST_VALUES = 10_000_000


class FileMark(NamedTuple):
    """A place in a file of lines: it is after so many lines, the last of which has that step."""

    lines: int
    step: int


class JsonLines:
    """A file of JSON objects with a `step`, one a line, which all attempts of a run share.

    At the first `write`, what an earlier attempt wrote after the save that the run resumes from is cut off, and so is a line that a kill
    left unfinished: every line is there once. A program that has neither begun to train nor saved cuts nothing: it may have loaded an
    older save in order to evaluate it, and its lines are added. A line is handed to the operating system before `write` returns, so that
    a killed process loses none.

    Args:
        file: The file.
        resume_step: The step of that save; lines of later steps are cut off.
        resume_mark: The mark of that save. It counts instead of the step: lines of the same step may have been written after the save.
        is_continued: Whether that save is of this directory: a warning then names lines that the file has lost.
        has_begun: Whether the program trains. If not, `begin_training` tells so later, and the file is cut then.
    """

    def __init__(
        self,
        file: PathLike,
        *,
        resume_step: int | None = None,
        resume_mark: FileMark | None = None,
        is_continued: bool = False,
        has_begun: bool = True,
    ) -> None:
        self.file = Path(file)
        self.mark: FileMark | None = None
        """The end of the file as this attempt has written it; `None` before the first line."""
        self._resume_step: int | None = resume_step or 0
        self._resume_mark = resume_mark
        self._is_continued = is_continued
        self._cuts = has_begun or not resume_step
        self._added: list[bytes] = []
        """The lines that were written before the training."""
        self._handle: int | None = None

    def write(self, line: Mapping[str, object]) -> None:
        """Append an object."""
        content = (json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode()
        self._append(content)
        if not self._cuts:
            self._added.append(content)
            return
        self.mark = FileMark(_lines_of(self.mark) + 1, int(str(line["step"])))

    def begin_training(self) -> None:
        """Cut off what does not belong to the save, and put what this attempt has added behind the rest."""
        if self._cuts:
            return
        # What was added is at the end of the file, after lines that are cut off: it goes too, and is
        # written again.
        self.close()
        self._cuts = True
        added, self._added = self._added, []
        for content in added:
            self.write(json.loads(content))

    def resume_from(self, step: int, mark: FileMark | None) -> None:
        """Continue from a save, in the process that has written the file: the next training cuts off what it wrote after that save."""
        self.close()
        self._resume_step, self._resume_mark, self._is_continued = step, mark, True
        self.mark, self._cuts, self._added = None, False, []

    def _append(self, content: bytes) -> None:
        try:
            if self._handle is None:
                self._handle = self._open()
            before = os.fstat(self._handle).st_size
            try:
                write_all(self._handle, content)
            except OSError:
                # The next line must not be joined to the part that was written.
                with suppress(OSError):
                    os.ftruncate(self._handle, before)
                raise
        except OSError as error:
            raise write_error("a line", self.file, error) from error

    def keep_all(self) -> None:
        """Append to the file as it is, though this attempt has not written it."""
        if self.file.exists():
            lines = list(_steps(self.file))
            self.mark = FileMark(len(lines), lines[-1][1] if lines else 0)
        self._resume_step, self._cuts = None, True

    def close(self) -> None:
        """Close the file. A line after it opens it again and appends."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _open(self) -> int:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if self._cuts and self._resume_step is not None:
            if self.file.exists():
                self.mark = _cut_back(self.file, self._resume_step, self._resume_mark)
            if self._is_continued:
                self._warn_of_lost_lines()
            # What this training has written is never cut.
            self._resume_step = None
        # No link is followed, and a pipe in its place does not block.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        handle = os.open(self.file, flags, 0o666)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            # A kill left the last line unfinished: the next one must not be joined to it.
            write_all(handle, b"\n")
        return handle

    def _warn_of_lost_lines(self) -> None:
        written, found = _lines_of(self._resume_mark), _lines_of(self.mark)
        if found < written:
            logger.warning(
                "%s has %s of the %s lines that were written before the checkpoint of this run: it was cut, changed or not copied. "
                "The metrics of those updates are missing there and in curves. If you have them, stop, put the file back, and start "
                "again.",
                self.file,
                f"{found:,}",
                f"{written:,}",
            )


class JsonlTracker(JsonLines):
    """Writes one JSON object a line: `{"step": 10, "time": 1767225600.0, "train/loss": 0.5}`.

    An attempt that logs nothing, since it only evaluates, leaves the file alone. `time` is in seconds since 1970; NaN and infinities are
    `null`.
    """

    def log(
        self, values: Mapping[str, float], step: int, *, beside: Mapping[str, object] | None = None
    ) -> None:
        """Append one line, also with plain values `beside` the metrics.

        Raises:
            ValueError: If a metric is called `step`, `time` or `ranks`.
        """
        for name in _OWN_NAMES:
            if name in values:
                raise ValueError(
                    "Expected names of metrics other than 'step', 'time' and 'ranks', which every line of metrics.jsonl has. "
                    f"Received: values={dict(values)}. Rename {name!r}, for example to 'train/{name}'."
                )
        numbers = {name: float(value) for name, value in values.items()}
        figures = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self.write({"step": int(step), "time": round(time.time(), 3), **figures, **(beside or {})})

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
                raise ValueError(
                    f"Expected at most {_MOST_VALUES:,} values. Received: {str(file)!r}, which has more."
                )
            record = parse_line(line)
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


def _lines_of(mark: FileMark | None) -> int:
    return 0 if mark is None else mark.lines


def _cut_back(file: Path, resume_step: int, mark: FileMark | None) -> FileMark:
    """Remove the lines that do not belong to a save, and return the mark of the rest."""
    # Without the mark, as after the file was edited, steps decide. A run from scratch keeps none.
    by_step = mark is None or not _has_mark(file, mark)
    most = _lines_of(mark)
    kept = FileMark(0, 0)
    with replacing(file) as new:
        for line, step in _steps(file):
            is_before = kept.lines < most
            if by_step:
                is_before = resume_step > 0 and step <= resume_step
            if is_before:
                new.write(line)
                kept = FileMark(kept.lines + 1, step)
    return kept


def _has_mark(file: Path, mark: FileMark) -> bool:
    """Whether the last line of a mark is where the mark says; it is not where lines were removed since."""
    if mark.lines == 0:
        return True
    return next((step for _, step in islice(_steps(file), mark.lines - 1, None)), None) == mark.step


def _steps(file: Path) -> Iterator[tuple[bytes, int]]:
    """Yield the whole lines of a file that can be read, each with its step."""
    with open_file(file) as lines:
        for line in bounded_lines(lines):
            record = parse_line(line)
            if record is not None:
                yield line, record["step"]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return what a line of metrics has; `None` if it is no line of metrics."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
