"""One way to save a run: what is checked before it, who writes, and at which update the last save stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Position(Protocol):
    """Counters of a run."""

    global_step: int
    epoch: int


class Manager(Protocol):
    """What writes a full state; see `danling.checkpoints.CheckpointManager`."""

    def save_checkpoint(
        self, payload: Mapping[str, object], *, epoch: int, global_step: int, history: bool, best: bool
    ) -> None:
        """Save a full state."""

    def export_model(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Write weights."""


class RunSaver:
    """Saves the full state of a run, once for each position that it is asked at."""

    def __init__(
        self,
        *,
        manager: Callable[[], Manager],
        position: Callable[[], Position],
        state: Callable[[], Mapping[str, object]],
    ) -> None:
        self._manager = manager
        self._position = position
        self._state = state
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.before: list[Callable[[], None]] = []
        self.writes: Callable[[], bool] = _yes
        self.is_scored: Callable[[], bool] = _yes
        self.instead: list[Callable[[], None]] = []
        self.saved: list[Callable[[], None]] = []
        self.loaded: list[Callable[[], None]] = []
        self.saved_at: tuple[int, int] | None = None
        self.best_elsewhere: int | None = None

    @property
    def at(self) -> tuple[int, int]:
        """Updates and epochs of the run as it is now."""
        position = self._position()
        return position.global_step, position.epoch

    @property
    def is_saved(self) -> bool:
        """Whether the last save stands where the run does."""
        return self.saved_at == self.at

    def save(self, *, history: bool = False, best: bool = False) -> None:
        """Save the full state. Called on all ranks."""
        with self.around():
            for check in self.before:
                check()
            step, epoch = self.at
            if self.writes():
                self._manager().save_checkpoint(
                    self._state(), epoch=epoch, global_step=step, history=history, best=best
                )
            else:
                for action in self.instead:
                    action()
            self.note_saved()
            for action in self.saved:
                action()

    def leave_out(self) -> None:
        """Skip the write of a save, but do everything else that belongs to it, such as flushing the trackers. Called on all ranks."""
        with self.around():
            pass

    def export(self, weights: Callable[[], Mapping[str, object]]) -> None:
        """Write weights only. Called on all ranks."""
        if self.writes():
            step, epoch = self.at
            self._manager().export_model(weights(), epoch=epoch, global_step=step)

    def note_saved(self) -> None:
        """Remember that the checkpoint on disk has the present state of the run."""
        self.saved_at = self.at

    def note_loaded(self) -> None:
        """Note that the run was restored from a checkpoint on disk. Called on all ranks."""
        self.note_saved()
        for action in self.loaded:
            action()


def _yes() -> bool:
    return True
