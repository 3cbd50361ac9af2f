"""Where updates that are made again take part in those of a run: around the forwards, the samples that are seen, and the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .replay import UpdateReplay
from .update_audit import Until, UpdateAudit
from .witness import Witness

_OVER = object()
"""What stands for a batch when there is none left; `None` may be one."""


class Forwards(Protocol):
    """What runs the micro-batches of an update; see `danling.training.micro_batches`."""

    agreement: Any

    def run(self, source: Any, batches: Iterator[Any], consumed: list[Any]) -> bool:
        """Run forward and backward of one update."""


class SampleAuditor(Protocol):
    """What else looks at samples."""

    def saw(self, data: object, *, first: bool) -> None:
        """Take in a micro-batch on the device."""


class ReplayedForwards:
    """Runs the micro-batches of an update, and of one that is checked again.

    Args:
        inner: Runs them.
        replay: Compares.
    """

    def __init__(self, inner: Forwards, replay: UpdateReplay) -> None:
        self.agreement = inner.agreement
        self._inner = inner
        self._replay = replay

    def run(self, source: Any, batches: Iterator[Any], consumed: list[Any]) -> bool:
        """Run forward and backward of one update; see `danling.training.micro_batches.Forwards`.

        Raises:
            ReplayMismatchError: If they did not come to the same.
        """
        return self._replay.forwards(lambda given, filled: self._inner.run(source, given, filled), batches, consumed)


class SeenSamples:
    """Shows samples to the witness of a replay, and to who looks at them besides.

    Args:
        witness: The witness.
        inner: Who looks besides; `None` where nobody does.
    """

    def __init__(self, witness: Witness, inner: SampleAuditor | None) -> None:
        self._witness = witness
        self._inner = inner

    def saw(self, data: object, *, first: bool) -> None:
        """Take in a micro-batch on the device; those that are made again are not counted again.

        Args:
            data: The batch.
            first: Whether it is the first one of its window.
        """
        if self._inner is not None and not self._witness.is_repeating:
            self._inner.saw(data, first=first)
        self._witness.saw(data)


class ReplayedAudit:
    """Looks at updates for a replay, and for who looks at them besides.

    Args:
        replay: The replay.
        inner: Who looks besides; `None` where nobody does.
    """

    def __init__(self, replay: UpdateReplay, inner: UpdateAudit | Until | None) -> None:
        self._replay = replay
        self._inner = inner

    def begin(self) -> None:
        """Begin a training."""
        self._replay.begin()
        if self._inner is not None:
            self._inner.begin()

    def updated(self, outcome: Any) -> None:
        """Look at an update."""
        self._replay.updated()
        if self._inner is not None:
            self._inner.updated(outcome)

    def settle(self) -> None:
        """Compare what was left to be compared."""
        self._replay.settle()
        if self._inner is not None:
            self._inner.settle()


def armed(batches: Iterator[Any], replay: UpdateReplay) -> Iterator[Any]:
    """Yield batches, and have the replay look at the state before each of them is read.

    Args:
        batches: The batches.
        replay: The replay.
    """
    while True:
        replay.arm()
        with replay.reading():
            batch = next(batches, _OVER)
        if batch is _OVER:
            return
        yield batch


def stepped(step: Callable[[], Any], replay: UpdateReplay) -> Callable[[], Any]:
    """Return what makes a step and has the replay look at what it has left.

    Args:
        step: Closes the window and decides the update.
        replay: The replay.
    """

    def step_and_look() -> Any:
        outcome = step()
        replay.after()
        return outcome

    return step_and_look
