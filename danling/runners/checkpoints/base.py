"""What the checkpoint managers share: policy and agreement; where and how a checkpoint is written is a store's business."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from danling.utils.protocols import ReductionDomain

from .errors import CheckpointError
from .executor import SaveExecutor
from .policy import Line, Record, history_name
from .settings import CheckpointSettings
from .snapshot import SnapshotBuffers, to_host
from .storage import require_space
from .store import CheckpointStore

logger = logging.getLogger("danling")

T = TypeVar("T")


class CheckpointManager(ABC):
    """Writes and reads the checkpoints of one run. Every method is called on all ranks, and fails on all or on none.

    Args:
        directory: Where the checkpoints of the run lie.
        domain: All ranks of the run.
        run_id: Identity of the run; checkpoints of another one in the same directory are refused.
        settings: Policy.
        step_mode: Whether history is named by steps.
    """

    store_class: ClassVar[type[CheckpointStore]]

    def __init__(
        self,
        directory: str | Path,
        *,
        domain: ReductionDomain,
        run_id: str,
        settings: CheckpointSettings,
        step_mode: bool,
    ) -> None:
        self.directory = Path(directory)
        self.domain = domain
        self.run_id = run_id
        self.settings = settings
        self.step_mode = step_mode
        self.store = self.store_class(self.directory, run_id=run_id)
        self._executor = SaveExecutor()
        self._buffers = SnapshotBuffers()
        self._line: Line | None = None
        self._resumed: Record | None = None
        self._closed = False

    # Saving

    def save_checkpoint(
        self, payload: Mapping[str, Any], *, epoch: int, global_step: int, history: bool = False, best: bool = False
    ) -> None:
        """Save a full state as `latest`, and under its history name and as `best` when asked to.

        Live tensors are copied before the call returns where the save goes on in the background. History and best are always
        written; another save that has not begun gives way to the next one.

        Args:
            payload: The state; tensors and plain values.
            epoch: Completed epochs.
            global_step: Committed updates.
            history: Keep it under its history name.
            best: Make it `best`.

        Raises:
            CheckpointError: If it, or one that was going on in the background, could not be written.
        """
        names = [history_name(step_mode=self.step_mode, epoch=epoch, global_step=global_step)] if history else []
        names += ["best"] if best else []
        # `latest` becomes visible last: it is what a restart looks for first.
        self._save(payload, [*names, "latest"], epoch=epoch, global_step=global_step)

    def export_model(self, payload: Mapping[str, Any], *, epoch: int, global_step: int) -> None:
        """Write weights only, as `model`; `latest` is left alone.

        Raises:
            CheckpointError: As `save_checkpoint`.
        """
        self._save(payload, ["model"], epoch=epoch, global_step=global_step)

    @abstractmethod
    def _save(self, payload: Mapping[str, Any], names: list[str], *, epoch: int, global_step: int) -> None:
        """Write a payload under names, now or in the background."""

    def _open_attempt(self, names: list[str], *, needed: int, epoch: int, global_step: int) -> list[Record]:
        """Check that a save can be made, and return its records. Call on rank 0.

        Args:
            names: Its names.
            needed: Bytes it takes.
            epoch: Completed epochs.
            global_step: Committed updates.
        """
        if self._line is None:
            self._line = self.store.open_line(self._resumed)
        require_space(self.directory, needed)
        self._line = replace(self._line, sequence=self._line.sequence + 1)
        line = self._line
        return [Record(n, line.sequence, line.branch, line.ancestors, self.run_id, global_step, epoch) for n in names]

    def _prune(self) -> None:
        if self._line is not None:
            self.store.prune(self._line, keep=self.settings.keep_latest_k, resumed=self._resumed)

    def _prepared(self, payload: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return the payload as it is written, and what to call when that is done."""
        if self.settings.is_async:
            return self._buffers.copy(payload)
        return to_host(payload), lambda: None

    # Loading

    @abstractmethod
    def load_checkpoint(self, source: str | Path) -> dict[str, Any]:
        """Return the verified payload of a checkpoint.

        Args:
            source: A name in the run's own directory, or a path.

        Raises:
            CheckpointNotFound: If there is none.
            CheckpointDamaged: If it is not what was written.
            CheckpointMismatch: If it lies in this run's directory and belongs to another run, or has a format that is not known.
        """

    def _verified(self, source: str | Path) -> Path:
        path = self.store.resolve(source)
        self.store.verify(path, self.settings.verify)
        self.store.describe(path)
        return path

    def find_latest(self) -> str | None:
        """Return the name of the newest checkpoint of this run's line that verifies; what is passed over is logged."""
        return self.on_main(lambda: self.store.find_latest(self.settings.verify))

    def begin(self, source: str | Path) -> None:
        """Hear which checkpoint the run goes on from.

        Retention spares it. When it is not the newest, the next save begins a new line, and what was saved after it is no longer
        part of the run; until then nothing changes on disk.

        Args:
            source: As in `load_checkpoint`.
        """
        self.wait()
        self._resumed = self.on_main(lambda: self.store.describe(self.store.resolve(source)))
        self._line = None

    # Ending

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: If something could not be.
        """
        self._executor.wait()
        self._surface()

    def maybe_wait_for_staging(self) -> None:
        """Wait until live tensors may change. They may as soon as a save returns: it has copied them by then."""
        return

    def close(self, timeout: float | None = None) -> None:
        """Write what is left, or give up after `timeout` seconds; complete checkpoints stay as they are. May be called twice.

        Nothing is agreed here: a rank that ends because of an error must not wait for the others. Call `wait` before it where all
        of them end together.

        Raises:
            CheckpointError: If something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        self._end(timeout)
        error = self._executor.take_error()
        self._raise(error, _told(error))

    def _end(self, timeout: float | None) -> None:
        if not self._executor.close(timeout):
            logger.warning(
                "A checkpoint was not written within %s seconds and is given up; complete ones are as they were.",
                timeout,
            )

    # Agreement

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; return its value, or raise its error, on all ranks."""
        value: Any = None
        error: Exception | None = None
        if self.domain.rank == 0:
            try:
                value = action()
            except Exception as raised:
                error = raised
        value, told = self.domain.broadcast_object((value, _told(error)))
        self._raise(error, told)
        result: T = value
        return result

    def _surface(self) -> None:
        """Raise an error of the background of any rank on all of them."""
        error = self._executor.take_error()
        told = self.domain.gather_objects(_told(error))
        self._raise(error, next((entry for entry in told if entry is not None), None))

    @staticmethod
    def _raise(error: BaseException | None, told: tuple[type[Exception], str] | None) -> None:
        if isinstance(error, (CheckpointError, ValueError)):
            raise error
        if told is not None:
            raise told[0](told[1]) from error


def _told(error: BaseException | None) -> tuple[type[Exception], str] | None:
    """Return what other ranks hear of an error: it need not be possible to pickle it."""
    if error is None:
        return None
    if isinstance(error, (CheckpointError, ValueError)):
        return type(error), str(error)
    message = f"Expected a checkpoint to be written or read. Received: {type(error).__name__}: {error}. What was complete before is still there."
    return CheckpointError, message
