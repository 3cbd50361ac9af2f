"""How a run is asked to stop, and what its session does then: signals, time, boundaries, and what a failure leaves behind."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from danling.config import RunnerConfig
from danling.data import Batch
from danling.distributed import agree, all_arrive, set_collective_timeout
from danling.reporting import speaking_for
from danling.supervision import (
    EXIT_CODES,
    is_out_of_memory,
    record_failures,
    write_memory_snapshot,
)
from danling.torchft import QuorumError, WaitAbandonedError
from danling.training import UpdateOutcome

from .torch_figures import TorchFigures

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""

_PRECEDENCE = ("terminate", "interrupt", "user_signal", "stop")
BY_SIGNAL = ("terminate", "interrupt", "user_signal")


class EvaluationStopped(Exception):
    """Leaves an evaluation that all ranks have agreed to stop in; it is made anew when the run is resumed."""


class TorchWatch(TorchFigures):
    """Requests, boundaries and the session of a torch runner."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._stop_for: str | None = None
        self._save_asked = False
        self._deadline = math.inf
        self._checkpoint_every = self._evaluate_every = 1
        self._first_update_done = False

    def init_distributed(self) -> None:
        """Read the launch environment and join the group; under torchrun a failure of this process is put on record.

        Called on all ranks.
        """
        record_failures()
        super().init_distributed()

    # Requests

    def stop(self) -> None:
        """Ask all ranks to stop after an update: at the next boundary they save the full state and `train` returns.

        May be called on one rank or on several, at any time.
        """
        self._asked.add("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._asked.add("save")

    def _note_requests(self) -> None:
        if self.signals is not None and self.signals.received is not None:
            self._asked.add(self.signals.request or "terminate")
        if time.monotonic() >= self._deadline:
            self._asked.add("stop")

    def asked_to_stop(self) -> bool:
        """Whether this rank has been asked to stop since the last boundary: by a signal, by `stop()`, or by `max_time`.

        No communication: may be called on one rank.
        """
        self._note_requests()
        return not self._asked.isdisjoint(_PRECEDENCE)

    def _requests(self) -> frozenset[str]:
        self._note_requests()
        return super()._requests()

    def _heed(self, requests: frozenset[str]) -> None:
        if not requests:
            return
        self._stop_for = next((name for name in _PRECEDENCE if name in requests), None)
        self._save_asked = "save" in requests

    # Evaluation in training: its batches are boundaries as well

    def boundaries(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation; in training, all ranks agree before each one whether to go on.

        Called on all ranks.

        A rank whose batches have come to their end goes on voting until those of all ranks have. Nothing is agreed outside of
        training, where nothing is watched.

        Args:
            split: The split.
            batches: What this rank evaluates.

        Raises:
            EvaluationStopped: On all ranks, when one was asked to stop.
        """
        if not self._in_session:
            yield from batches
            return
        heard = self.ballot.settle()
        self._asked |= heard & {"save"}
        done = 0
        with self._reporter.aside(f"{split} 0"):
            while self._evaluates_on(batch := next(batches, None), heard):
                self._reporter.doing(f"{split} {done}")
                if self.heartbeat is not None:
                    self.heartbeat.beat(self.state.train.global_step, self.state.train.epoch)
                done += 1
                if batch is not None:
                    yield batch

    def _evaluates_on(self, batch: Batch | None, heard: frozenset[str]) -> bool:
        self._note_requests()
        votes = {name for name in self._asked if name in _PRECEDENCE} | ({"continue"} if batch is not None else set())
        agreed = agree(self.optimizer_domain, votes)
        stop = next((name for name in _PRECEDENCE if name in agreed | heard | {self._stop_for}), None)
        if stop is not None:
            self._stop_for = stop
            self._asked.difference_update(_PRECEDENCE)
            raise EvaluationStopped
        return "continue" in agreed

    def _keeper(self, *, saves_next: bool) -> Callable[[], bool]:
        """Return what saves the state as it is now after a failure of this rank, when the others may be anywhere.

        Args:
            saves_next: Whether a checkpoint follows the evaluation, so that one that takes all ranks may as well begin before it.
        """
        train, manager = self.state.train, self.checkpoint_manager
        at = (train.global_step, train.epoch)
        alone = getattr(manager, "save_alone", None)
        if self.saver.saved_at == at or self.config.checkpoint.load_only:
            return lambda: self.saver.saved_at == at
        if self.world_size > 1 and alone is not None and self.fault_tolerance is None:
            # Gathered now, since a rank that fails finds nobody to gather it from.
            self.settle()
            payload = self.checkpoint_state()
            return lambda: bool(alone(payload, epoch=at[1], global_step=at[0]))
        ahead = getattr(manager, "save_ahead", None)
        if self.world_size > 1 and ahead is not None and saves_next and self.fault_tolerance is None:
            self.settle()
            ahead(self.checkpoint_state(), epoch=at[1], global_step=at[0])
            saved: Callable[[], bool] = manager.is_saved_ahead
            return saved
        return self._save_together

    def _save_together(self) -> bool:
        self._failures += 1
        if not all_arrive(f"failed/{self._failures}", seconds=_PATIENCE_SECONDS):
            return False
        self.save_checkpoint(save_best=False)
        self.checkpoint_manager.wait()
        return True

    _failures: int = 0
    """Evaluations of this process that failed."""

    # The session

    @contextmanager
    def _session(self, *, whole: bool = True) -> Iterator[None]:
        """Train: what is logged meanwhile is of this run, whichever others are open.

        Args:
            whole: Whether the run ends here; a verb that was called alone saves only where it was asked to stop.
        """
        with (
            speaking_for(self._run_log),
            self._collecting(),
            self._evaluation.watched(self.boundaries),
            self._watched(whole),
        ):
            yield

    @contextmanager
    def _watched(self, whole: bool) -> Iterator[None]:
        """Signals watched, the bar open; a stop that was asked for ends in a full checkpoint."""
        self._stop_for = None
        self._save_asked = False
        self.begin_updates()
        self.model.train()
        limit = self.config.max_time_seconds()
        self._deadline = time.monotonic() + limit if limit is not None else math.inf
        self._log_every = self.log_interval
        self._checkpoint_every = self.checkpoint_interval
        self._evaluate_every = self.config.evaluate_interval or self._checkpoint_every
        self.open_trackers()
        self.init_signal_handlers()
        self._begin_report()
        self._in_session = True
        try:
            try:
                yield
            except EvaluationStopped:
                logger.debug("An evaluation was left; it is made anew when the run is resumed.")
            except WaitAbandonedError:
                self._heed(agree(self.optimizer_domain, self._requests()))
            self._in_session = False
            if self._stops_late() or whole:
                self._finish_session()
        except Exception as error:
            if isinstance(error, QuorumError):
                self._save_before_leaving()
            self._note_failure(error)
            raise
        finally:
            self._in_session = False
            # Where torchrun ends the ranks that are left when the first one has gone, they end by the code of the signal too.
            if self.signals is not None and not (self._stop_for in BY_SIGNAL and self.distributed):
                self.signals.uninstall()
            self._reporter.end()
            self._reporter.flush()
            if self.fault_tolerance is not None:
                # A group that stays and does not train would hold the others up.
                self.fault_tolerance.leave()
        self._redeliver()

    def _save_before_leaving(self) -> None:
        """Save where the replica groups have lost each other: this group stands between two updates."""
        logger.error(
            "Lost the other replica groups, or a rank of this one, after step %d; saving.", self.state.train.global_step
        )
        try:
            self.save_checkpoint()
            self.checkpoint_manager.wait()
        except Exception:
            logger.exception("That save failed; the loss itself follows.")

    def _stops_late(self) -> bool:
        """Whether the session was asked to stop, be it in its last update."""
        self.settle()
        if self.heartbeat is not None:
            # The epoch has been counted since the last update.
            self.heartbeat.beat(self.state.train.global_step, self.state.train.epoch)
        # What was asked for in the last update, which an accelerator hands out with the next one.
        late = self.ballot.settle()
        self._stop_for = self._stop_for or next((name for name in _PRECEDENCE if name in late), None)
        return self._stop_for is not None

    def _finish_session(self) -> None:
        if not self.saver.is_saved:
            self.save_checkpoint()
        if self._stop_for is None and self.config.checkpoint.last_save_model_only:
            self.export_model()
        self.write_results()
        # On all ranks, so that an error of the background writer is raised on all of them.
        self.checkpoint_manager.wait()
        self._hear_late_signals()
        self._say_ending(_ENDINGS.get(str(self._stop_for), "Finished"))
        if self._stop_for in BY_SIGNAL:
            logger.info("Stopped by a signal at step %d; the full state is saved.", self.state.train.global_step)
            raise SystemExit(EXIT_CODES[self._stop_for])

    def _hear_late_signals(self) -> None:
        """Heed a signal that came after the last boundary, as in the last save: there is none left to heed it at."""
        received = self.signals.request if self.signals is not None else None
        late = agree(self.optimizer_domain, {received} if received is not None else ())
        self._stop_for = next((name for name in BY_SIGNAL if name in late | {self._stop_for}), self._stop_for)

    def _redeliver(self) -> None:
        """Send this process once more the signal that came too late to be heeded, now that the program's own handlers are back."""
        if self.signals is not None and self.signals.received is not None and self._stop_for not in BY_SIGNAL:
            signal.raise_signal(self.signals.received)

    def _note_failure(self, error: Exception) -> None:
        if is_out_of_memory(error):
            directory = self.workspace.dir / self.config.profiling.trace_dir
            step = self.state.train.global_step
            write_memory_snapshot(directory, error, rank=self.rank, global_step=step, device=self.device)
        self._say_ending(f"Failed with {type(error).__name__}")

    # Boundaries

    def save_checkpoint(self, *, history: bool = False, save_best: bool = True) -> None:
        """Save the full state as `latest`, and under the other names it deserves. Call on all ranks.

        It may be written in the background, see `checkpoint.async_enabled`; the time it takes is left out of the speed of training.

        Args:
            history: Also keep it under its history name, `ckpt-e...` or `ckpt-s...`.
            save_best: Also make it `best` when the score of this very state is the best one.

        Raises:
            CheckpointError: If an earlier save in the background failed, or this one cannot be written.
            NonFiniteError: If the update before it was not finite, which shows on an accelerator only now.
        """
        if not self._in_session:
            super().save_checkpoint(history=history, save_best=save_best)
            return
        with self._reporter.aside("checkpoint"):
            super().save_checkpoint(history=history, save_best=save_best)
        self._reporter.trackers.flush()

    def _after_update(self, outcome: UpdateOutcome) -> None:
        """What happens at every update boundary, besides evaluation and periodic checkpoints."""
        step = self.state.train.global_step
        if outcome.committed:
            if not self._first_update_done:
                self._tighten_timeout()
            if step % self._log_every == 0:
                self._log_update(outcome)
        # A skipped update is work that was done as well, on all ranks.
        if self.heartbeat is not None:
            self.heartbeat.beat(step, self.state.train.epoch)
        if self.gc_pacer is not None:
            self.gc_pacer.step()
        self._reporter.stepped(step)
        # Where an evaluation is due first, the checkpoint follows it, so that a resumed run does not leave the evaluation out.
        if self._save_asked and not (self.is_step_mode and outcome.committed and self.evaluation_due()):
            self.save_checkpoint()
            self._save_asked = False

    def evaluation_due(self) -> bool:
        """Whether step mode evaluates at this step.

        No communication: may be called on one rank.
        """
        step = self.state.train.global_step
        return step % self._evaluate_every == 0 or step == self.steps

    def _tighten_timeout(self) -> None:
        if self.compilation is not None and self.is_main_process:
            self.compilation.warn_without_graph()
        # Compilation and the first data make the first update slow; the limit that catches a hang begins after it, everywhere.
        self._first_update_done = True
        limit = self.config.comm.train_timeout_seconds
        if limit is not None and self.distributed:
            self.world.barrier()
            set_collective_timeout(limit, self.training_groups())

    def training_groups(self) -> Sequence[Any]:
        """Return the process groups that training communicates over; `None` is the default one.

        No communication: may be called on one rank.
        """
        return [None]


_ENDINGS = {
    "terminate": "Stopped by SIGTERM",
    "interrupt": "Stopped by SIGINT",
    "user_signal": "Stopped by SIGUSR1",
    "stop": "Stopped",
    "patience": "Stopped early",
}
