"""Ends a run where a checkpoint stands that it is compared with: there it saves one of its own, and stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from .update_audit import AuditedUpdate


class Session(Protocol):
    """What a training is told; see `danling.training.TrainingSession`."""

    save_requested: bool
    stop_reason: str | None


class InnerAudit(Protocol):
    """What else looks at updates."""

    def begin(self) -> None:
        """Look at the state before a training."""

    def updated(self, outcome: AuditedUpdate) -> None:
        """Look at the state after an update."""

    def settle(self) -> None:
        """Compare what was left to be compared."""


class Until:
    """Has a run save at a position and end there. Called on all ranks, which come to the same.

    Args:
        target: Updates and completed epochs of the checkpoint.
        at: Returns those of the run.
        session: Is told to save and to stop.
        ended: Is called when the run has saved there.
        inner: What else looks at updates; `None` where nothing does.
    """

    def __init__(
        self,
        target: Sequence[int],
        *,
        at: Callable[[], tuple[int, int]],
        session: Session,
        ended: Callable[[], None] = lambda: None,
        inner: InnerAudit | None = None,
    ) -> None:
        self.target = tuple(target)
        self._at = at
        self._session = session
        self._ended = ended
        self._inner = inner

    def begin(self) -> None:
        """Nothing is to be done before a training."""
        if self._inner is not None:
            self._inner.begin()

    def updated(self, outcome: AuditedUpdate) -> None:
        """Have the run save after the last update, and end where it has come beyond it."""
        if self._inner is not None:
            self._inner.updated(outcome)
        step = self._at()[0]
        if step == self.target[0]:
            # At once, and not as a request, of which an accelerator hears an update later.
            self._session.save_requested = True
        elif step > self.target[0]:
            self._session.stop_reason = "stop"

    def settle(self) -> None:
        """Compare what was left to be compared."""
        if self._inner is not None:
            self._inner.settle()

    def saved(self) -> None:
        """End the run where it has saved at the position; the same update may be saved before and after the end of its epoch."""
        if self._at() == self.target:
            self._session.stop_reason = "stop"
            self._ended()
