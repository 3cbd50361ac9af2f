"""Both sides of a stream put together: what producers and trainers have written of it into their run directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Side = Literal["producer", "trainer"]


@dataclass(frozen=True)
class StreamSide:
    """What one run has written of a stream.

    Attributes:
        run: Name of the run.
        stream: Name of the log.
        side: Whether the run fills it or trains on it.
        published: Samples in the log.
        trained: Samples that are trained on; of a producer, those that a checkpoint of the trainer lies behind.
        waited_seconds: Seconds that the run has waited for the other side since it was started last.
        end: How the log has ended, `None` while it is open.
        written: When this was written, in seconds.
    """

    run: str
    stream: str
    side: Side
    published: int
    trained: int
    waited_seconds: float
    end: str | None
    written: float

    @classmethod
    def of(cls, run: str, record: Mapping[str, Any], written: float) -> StreamSide:
        """Return what a record says."""
        try:
            side, end = record["side"], record["end"]
            if side not in ("producer", "trainer"):
                raise ValueError(f"side {side!r}")
            counts = int(record["published"]), int(record["trained"]), float(record["waited_seconds"])
            return cls(run, str(record["stream"]), side, *counts, None if end is None else str(end), written)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"Expected how far a stream is. Received: {record!r} ({error}).") from None


@dataclass(frozen=True)
class Stream:
    """A stream, as the runs say that were found.

    Attributes:
        name: Its log.
        producers: Runs that fill it.
        trainers: Runs that train on it.
    """

    name: str
    producers: tuple[StreamSide, ...]
    trainers: tuple[StreamSide, ...]

    @property
    def published(self) -> int:
        """Samples in the log."""
        return max(side.published for side in (*self.producers, *self.trainers))

    @property
    def trained(self) -> int:
        """Samples that are trained on by the run that is behind the others."""
        return min(side.trained for side in self.trainers or self.producers)

    @property
    def end(self) -> str:
        """How the log has ended: `complete`, `failed` or `stopped`, and `open` while it has not."""
        sides = sorted((*self.producers, *self.trainers), key=lambda side: side.written)
        return "complete" if any(side.end == "complete" for side in sides) else sides[-1].end or "open"

    def summary(self) -> dict[str, Any]:
        """Return the stream as one row of plain values."""
        return {
            "stream": self.name,
            "published": self.published,
            "trained": self.trained,
            "waiting": max(self.published - self.trained, 0),
            "end": self.end,
            "producers": [{"run": side.run, "waited_seconds": side.waited_seconds} for side in self.producers],
            "trainers": [
                {"run": side.run, "trained": side.trained, "waited_seconds": side.waited_seconds}
                for side in self.trainers
            ],
        }


def streams_of(sides: Sequence[StreamSide]) -> list[Stream]:
    """Return the streams that runs fill or train on, each with all of these, sorted by name."""
    names = sorted({side.stream for side in sides})
    return [
        Stream(
            name,
            tuple(side for side in sides if side.stream == name and side.side == "producer"),
            tuple(side for side in sides if side.stream == name and side.side == "trainer"),
        )
        for name in names
    ]
