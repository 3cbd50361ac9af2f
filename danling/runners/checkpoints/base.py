"""What the checkpoint managers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from danling.utils.protocols import ReductionDomain

from .errors import CheckpointError
from .settings import CheckpointSettings

T = TypeVar("T")


class CheckpointManager(ABC):
    """Writes and reads the checkpoints of one run. Every method is called on all ranks.

    Args:
        directory: Where the checkpoints of the run lie.
        domain: All ranks of the run.
        run_id: Identity of the run; checkpoints of another one in the same directory are refused.
        settings: Policy.
        step_mode: Whether history is named by steps.
    """

    def __init__(
        self, directory: Path, *, domain: ReductionDomain, run_id: str, settings: CheckpointSettings, step_mode: bool
    ) -> None:
        self.directory = Path(directory)
        self.domain = domain
        self.run_id = run_id
        self.settings = settings
        self.step_mode = step_mode

    @abstractmethod
    def save_checkpoint(
        self, payload: Mapping[str, Any], *, epoch: int, global_step: int, history: bool = False, best: bool = False
    ) -> None:
        """Save a full state as `latest`, and under its history name and `best` when asked to.

        Live tensors are copied before the call returns where the save goes on in the background.

        Args:
            payload: The state; tensors and plain values.
            epoch: Completed epochs.
            global_step: Committed updates.
            history: Keep it under its history name; such a save and one of the best are always written.
            best: Make it `best`.

        Raises:
            CheckpointError: If it, or one that was going on in the background, could not be written; on all ranks.
        """

    @abstractmethod
    def export_model(self, payload: Mapping[str, Any], *, epoch: int, global_step: int) -> None:
        """Write weights only, as `model`; `latest` is left alone."""

    @abstractmethod
    def load_checkpoint(self, source: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint.

        Args:
            source: A name in the run's own directory, or a path.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If it is not what was written.
            CheckpointMismatch: If it lies in this run's directory and belongs to another run.
        """

    @abstractmethod
    def find_latest(self) -> str | None:
        """Return the name of the newest checkpoint of this run's line that verifies; `None` when there is none."""

    @abstractmethod
    def begin(self, source: str | Path) -> None:
        """Hear which checkpoint the run goes on from: retention spares it, and an older one than the newest begins a new line."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: If something could not be; on all ranks.
        """

    def maybe_wait_for_staging(self) -> None:
        """Wait until live tensors may change; nothing to do where they are copied before a save returns."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Write what is left, or give up after `timeout` seconds; complete checkpoints stay as they are.

        Raises:
            CheckpointError: If something could not be written; on all ranks.
        """

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; return its value, or raise its error, on all ranks."""
        outcome: tuple[Any, BaseException | None] = (None, None)
        if self.domain.rank == 0:
            try:
                outcome = (action(), None)
            except Exception as error:
                if self.domain.size == 1:
                    raise
                outcome = (None, error)
        value, error = self.domain.broadcast_object(outcome)
        if error is not None:
            raise error
        result: T = value
        return result

    def surface(self, error: BaseException | None) -> None:
        """Raise an error of the background on all ranks."""

        def fail() -> None:
            if error is not None:
                raise CheckpointError(
                    f"Expected the checkpoint before this one to be written. Received: {type(error).__name__}: {error}. What was "
                    "complete before is still there."
                ) from (error if isinstance(error, Exception) else None)

        self.on_main(fail)
