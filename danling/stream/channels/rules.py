"""What holds for the log of every stream, wherever it is written: what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..protocols import StreamEnd

ENDS = ("complete", "failed", "stopped")


def check_open(name: str, end: StreamEnd | None) -> None:
    """Check that samples can be appended."""
    if end is None:
        return
    mend = (
        "A complete log stays as it is: begin another stream."
        if end.kind == "complete"
        else "Call reopen to go on where it ended."
    )
    reason = f": {end.reason}" if end.reason else ""
    raise RuntimeError(
        f"Expected the log of stream {name} to be open. Received: it is {end.kind} after {end.published} samples{reason}. {mend}"
    )


def check_kind(kind: str) -> None:
    """Check the word that says how a log ends."""
    if kind not in ENDS:
        raise ValueError(f"Expected one of {', '.join(ENDS)} as the end of a stream. Received: {kind!r}.")


def stored_watermark(name: str, value: object) -> int:
    """Return the watermark that is stored with a log."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(
            f"Expected a watermark of at least 0 in the log of stream {name}. Received: {value!r}. Bring the log back from a copy."
        )
    return value


def stored_end(record: Mapping[str, Any]) -> StreamEnd:
    """Return how a log ended from its own record."""
    kind, published, reason = record.get("end"), record.get("published"), record.get("reason")
    if kind not in ENDS or not isinstance(published, int) or not isinstance(reason, str):
        raise ValueError(f"no end of a stream: {dict(record)!r}")
    return StreamEnd(kind, published, reason)


def check_range(start: int, stop: int) -> None:
    """Check two places in the log."""
    if not 0 <= start <= stop:
        raise ValueError(f"Expected places of samples with 0 <= start <= stop. Received: start={start}, stop={stop}.")


def check_watermark(name: str, position: int, published: int) -> None:
    """Check a watermark."""
    if not 0 <= position <= published:
        raise ValueError(
            f"Expected a watermark between 0 and the {published} samples in the log of stream {name}. Received: {position}. "
            "Resume a run with the log that it was trained on."
        )


def check_owner(name: str, owner: str, run: str) -> None:
    """Check that a live log belongs to a run."""
    if owner and owner != run:
        raise RuntimeError(
            f"Expected the live stream {name} to be read by the run that began it, {owner}. Received: run {run}. "
            "Resume that run, wait until the stream is complete, or begin another stream."
        )


def check_part(name: str, part: int, parts: int, known: int) -> None:
    """Check which of several producers ends."""
    if not 0 <= part < parts:
        raise ValueError(
            f"Expected a part of stream {name} from 0 to {parts - 1}. Received: part={part}, parts={parts}."
        )
    if known not in (0, parts):
        raise ValueError(
            f"Expected all producers of stream {name} to agree about their number. Received: parts={parts}, and {known} by another. "
            "Start each with the same number."
        )
