"""Which samples of a log make the next update: on every rank the same ones, without a word between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from danling.data import Division

from .protocols import RefChannel
from .refs import SampleRef

_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at the log."""


@dataclass(frozen=True)
class Window:
    """The samples of one update over all ranks.

    Attributes:
        start: Place in the log of the first one.
        refs: The samples.
    """

    start: int
    refs: list[SampleRef]

    @property
    def stop(self) -> int:
        """The place after the last one."""
        return self.start + len(self.refs)


@dataclass(frozen=True)
class Part:
    """One micro-batch of a rank.

    Attributes:
        start: Place in the log of its first sample; padding has the place that it would have.
        refs: Its samples; for padding the first one of the window.
        samples: How many of them count on this rank; none of padding does.
        total: How many count over all ranks.
        closes: Whether it is the last one of the update.
    """

    start: int
    refs: list[SampleRef]
    samples: int
    total: int
    closes: bool


def parts_of(window: Window, division: Division, rank: int) -> list[Part]:
    """Return the micro-batches of a rank: as many as every other one makes, with padding where a rank has fewer samples."""
    samples = len(window.refs)
    cuts = list(zip(division.cut(samples, rank), division.totals(samples), strict=True))
    return [
        Part(
            window.start + offset,
            window.refs[offset : offset + size] or window.refs[:1],
            size,
            total,
            closes=number == len(cuts),
        )
        for number, ((offset, size), total) in enumerate(cuts, start=1)
    ]


class WindowReader:
    """Opens one window of a log after the other.

    A window is opened once the log holds all of it. A shorter one is the last one, and is opened once the log says that it is
    complete: both are facts of the log that never change, so every rank that looks comes to the same windows, whenever it looks.
    """

    def __init__(
        self,
        channel: RefChannel,
        *,
        samples: int,
        start: int,
        idle_seconds: float,
        waiting: Callable[[int], bool],
        waited: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waited = 0.0
        self._channel = channel
        self._samples = samples
        self._next = start
        self._idle_seconds = idle_seconds
        self._waiting, self._waited = waiting, waited
        self._clock = clock
        self._published = 0

    def open(self, *, wait: bool) -> Window | None:
        """Return the next window; `None` where the log is at its end, and without waiting where it is not there yet."""
        start, stop = self._next, self._next + self._samples
        if self._published < stop:
            before = self.waited
            end = self._find_end(stop, wait=wait)
            stop = stop if end is None else end
            if self.waited > before:
                self._waited()
        if stop <= start:
            return None
        self._next = stop
        return Window(start, self._channel.read(start, stop))

    def _find_end(self, stop: int, *, wait: bool) -> int | None:
        """Return `None` once the log holds all up to `stop`, else where it ends, `start` where that is not known yet."""
        grown = self._clock()
        start, pause = self._next, _POLL_SECONDS[0]
        while (published := self._channel.published()) < stop:
            end = self._channel.ended()
            if end is not None and end.kind == "complete":
                return min(stop, end.published) if end.published > self._next else self._next
            if not wait:
                return self._next
            # It may have grown, and ended, since it was counted.
            if end is not None and (published := self._channel.published()) < stop:
                raise RuntimeError(_ended_early(self._channel.name, end.kind, end.reason, published, self._next))
            now = self._clock()
            if published > self._published:
                self._published, grown = published, now
            elif now - grown > self._idle_seconds:
                raise TimeoutError(
                    f"Expected samples {published} to {stop - 1} from the producer of stream {self._channel.name}. Received: nothing for "
                    f"{self._idle_seconds:g} seconds (idle_timeout). See whether the producer lives, start it again, or raise idle_timeout "
                    "where it takes so long; this run goes on from its last checkpoint."
                )
            if self._waiting(start):
                grown, pause = self._clock(), _POLL_SECONDS[0]
            else:
                time.sleep(pause)
                pause = min(pause * 2, _POLL_SECONDS[1])
            self.waited += self._clock() - now
        self._published = published
        return None


def _ended_early(name: str, kind: str, reason: str, published: int, position: int) -> str:
    how = "failed" if kind == "failed" else "was stopped"
    why = f": {reason.rstrip('.')}" if reason else ""
    return (
        f"Expected the producer of stream {name} to go on: its log is not complete. Received: it {how} after {published} samples, of which "
        f"{position} are trained on{why}. Start the producer again, which goes on behind the last one, and then this run, which goes on "
        "from its last checkpoint."
    )
