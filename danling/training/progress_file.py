"""`progress.json` in the run directory: how far a training is, for schedulers and dashboards."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from typing import TYPE_CHECKING

from danling.checkpoints import CheckpointError, CheckpointManager
from danling.utils.files import write_atomically
from danling.utils.messages import clause
from danling.utils.observers import Observer

from .session import STOPS, TrainingSession

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

    from .outcome import UpdateOutcome

logger = logging.getLogger("danling")

FORMAT = 1
"""Version of the file. Later versions may add keys; one that changes or removes a key has another number."""

SECONDS_BETWEEN_WRITES = 5.0


class ProgressFile(Observer):
    """Writes `progress.json` when the run is opened, when a training begins, at most every five seconds while it runs, when it ends, and
    when the runner is closed.

    The main thread writes: a file that gets old belongs to a process that was killed, or that makes no progress. Each write replaces the
    file as a whole. A failure is logged once, and training continues. `docs/guides/kubernetes.md` lists the keys.

    Only the main process has one.
    """

    def __init__(self, runner: TorchRunner, session: TrainingSession) -> None:
        self._runner = runner
        self._session = session
        self._due = -math.inf
        self._is_training = False
        self._has_warned = False
        self._began = time.monotonic()
        self._began_at_step = 0
        # The file of an earlier attempt must not pass for one of this attempt, which may take minutes to begin.
        self._write("starting", None)

    def close(self) -> None:
        """Write a last time: saves in the background are complete now. Called behind the checkpoint manager's own end."""
        self._write(*self._ending())

    # Events

    def training_started(self) -> None:
        self._is_training = True
        self._began = time.monotonic()
        self._began_at_step = self._runner.state.train.global_step
        self._due = -math.inf
        self._write_if_due("running")

    def update_ended(self, outcome: UpdateOutcome) -> None:
        # Looked at here, so that an update costs one call.
        if time.monotonic() >= self._due:
            self._write_if_due("running")

    def boundary_reached(self) -> None:
        self._write_if_due("running")

    def evaluation_started(self, split: str) -> None:
        self._write_if_due("evaluating")

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self._write_if_due("evaluating")

    def save_started(self) -> None:
        self._write_if_due("saving")

    def training_ended(self) -> None:
        if self._is_training:
            self._is_training = False
            self._write(*self._ending())

    # Writing

    def _write_if_due(self, state: str) -> None:
        now = time.monotonic()
        if self._is_training and now >= self._due:
            self._due = now + SECONDS_BETWEEN_WRITES
            is_stopping = self._session.stop_reason is not None
            self._write("stopping" if is_stopping else state, self._session.stop_reason)

    def _ending(self) -> tuple[str, str | None]:
        """Return the last state of this training, and why it ended there."""
        runner, reason = self._runner, self._session.stop_reason
        if self._session.ending is not None:
            state, reason = self._session.ending
            if state is not None:
                return state, reason
        has_budget = runner.steps is not None or runner.epochs is not None
        is_over = runner.progress >= 1 or self._session.data_ended or reason == "patience"
        # Without a request to stop, the program has left the training itself, or has asked for one pass alone.
        is_stopped = reason in STOPS or (has_budget and not is_over)
        return "stopped" if is_stopped else "done", reason

    def _write(self, state: str, reason: str | None) -> None:
        try:
            text = json.dumps(self._record(state, reason), allow_nan=False)
            write_atomically(self._runner.workspace.progress_file, text + "\n", durable=False)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                text = clause(error)
                logger.warning("progress.json could not be written: %s. Training continues.", text)

    def _record(self, state: str, reason: str | None) -> dict[str, object]:
        runner, train, now = self._runner, self._runner.state.train, time.time()
        return {
            "format": FORMAT,
            "state": state,
            "reason": reason,
            "time": round(now, 3),
            "step": train.global_step,
            "steps": runner.steps,
            "epoch": train.epoch,
            "epochs": runner.epochs,
            "seconds": round(time.monotonic() - self._began, 3),
            "seconds_left": self._seconds_left(state),
            "last_checkpoint": self._last_checkpoint(),
            "processes": runner.world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _seconds_left(self, state: str) -> float | None:
        """Estimate by the pace of this training, with its evaluations and saves; `None` where that is not known."""
        if state == "done":
            return 0.0
        runner = self._runner
        step = runner.state.train.global_step
        made = step - self._began_at_step
        if runner.steps is None or made <= 0:
            return None
        left = (time.monotonic() - self._began) / made * max(runner.steps - step, 0)
        return round(left, 1) if math.isfinite(left) else None

    def _last_checkpoint(self) -> dict[str, object] | None:
        """Return step and epoch of the complete checkpoint `latest` in the run directory; `None` before the first one."""
        manager = self._runner.checkpoint_manager
        if not isinstance(manager, CheckpointManager):
            return None
        try:
            # The store of this machine only: an object store must not delay an update.
            path = manager.store.find("latest")
            record = manager.store.record(path) if path is not None else None
        except CheckpointError:
            return None
        return {"step": record.step, "epoch": record.epoch} if record is not None else None
