"""What the managers share whose saves take all ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from .base import CheckpointManager


class CollectiveCheckpointManager(CheckpointManager):
    """A manager whose saves take all ranks, so that nobody can make one alone once an evaluation has failed: it is made before."""

    _ahead: object | None = None
    """What the next save takes over from the last one, where that one was made ahead of an evaluation."""

    def save_ahead(self, payload: Mapping[str, object], *, epoch: int, global_step: int) -> None:
        """Save a state as `latest` before an evaluation, after which the next save of it writes again only what has changed.

        Call on all ranks. Until then a run that goes on finds this one.

        Args:
            payload: The state; tensors and plain values.
            epoch: Completed epochs.
            global_step: Committed updates.

        Raises:
            CheckpointError: As `save_checkpoint`.
        """
        self._save(payload, ["latest"], epoch=epoch, global_step=global_step, ahead=True)

    def is_saved_ahead(self) -> bool:
        """Whether the last save was one ahead and is complete, which is waited for. No communication: may be called on one rank."""
        self._executor.wait()
        return self._ahead is not None

    @abstractmethod
    def _save(
        self, payload: Mapping[str, object], names: list[str], *, epoch: int, global_step: int, ahead: bool = False
    ) -> None:
        """Write a payload under names, now or in the background; `ahead` of an evaluation, remember what the next save may take over."""
