"""How a run is asked to stop, and what its session does then: signals, time, boundaries, and what a failure leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from danling.data import Batch
from danling.distributed import all_arrive, set_collective_timeout
from danling.reporting import speaking_for
from danling.supervision import is_out_of_memory, record_failures, write_memory_snapshot
from danling.torchft import QuorumError, WaitAbandonedError
from danling.training import Boundaries, SessionEnd, UpdateOutcome

from .torch_figures import TorchFigures

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""


class TorchWatch(TorchFigures):
    """Requests, boundaries and the session of a torch runner."""

    # Made anew for every training.
    _boundaries: Boundaries

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
        self._session.request("stop")

    def request_checkpoint(self) -> None:
        """Ask all ranks for a checkpoint at the next update boundary. May be called on one rank."""
        self._session.request("save")

    # Evaluation in training: its batches are boundaries as well

    def boundaries(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation; in training, all ranks agree before each one whether to go on.

        Args:
            split: The split.
            batches: What this rank evaluates.

        Raises:
            EvaluationStopped: On all ranks, when one was asked to stop.
        """
        if not self._session.running:
            return batches
        return self._between_batches(split, batches)

    def _between_batches(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        session, reporter, train = self._session, self._reporter, self.state.train

        def seen(number: int) -> None:
            reporter.doing(f"{split} {number}")
            session.beat(train.global_step, train.epoch)

        with reporter.aside():
            pending = self.ballot.settle()
            yield from session.between_batches(batches, domain=self.placement.optimizer, pending=pending, seen=seen)

    def _keeper(self) -> Callable[[], bool]:
        """Return what saves the state as it is now after a failure of this rank, when the others may be anywhere.

        A save that takes all ranks begins here, since one that fails finds nobody to make it with.
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
        ahead = getattr(manager, "save_ahead", None) if self.config.checkpoint.before_evaluation else None
        if self.world_size > 1 and ahead is not None and self.fault_tolerance is None:
            with self._reporter.aside("checkpoint"):
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
    def _training(self, *, whole: bool = True) -> Iterator[None]:
        """Train inside: what is logged meanwhile is of this run, signals are watched, and the end is saved.

        Args:
            whole: Whether the run ends here; a verb that was called alone saves only where it was asked to stop.
        """
        with speaking_for(self._run_log), self._session.collecting():
            self.begin_updates()
            self.model.train()
            self._session.begin(max_seconds=self.config.max_time_seconds())
            self._boundaries = self._build_boundaries()
            self._log_every = self._boundaries.log_every
            self.open_trackers()
            self.init_signal_handlers()
            self._begin_report()
            opened = self._session.opened(self._session_end(), domain=self.placement.optimizer, whole=whole)
            with self._evaluation.watched(self.boundaries), opened:
                yield

    def _build_boundaries(self) -> Boundaries:
        every = self.checkpoint_interval
        return Boundaries(
            log_every=self.log_interval,
            evaluate_every=self.config.evaluate_interval or every,
            checkpoint_every=every,
            save=self.save_checkpoint,
            is_best=self._has_best_at,
        )

    def _has_best_at(self, index: int) -> bool:
        return index in self.results and self.is_best and self.standing.latest_index == index

    def _session_end(self) -> SessionEnd:
        return SessionEnd(
            pending=self._pending_requests,
            finish=self._finish_training,
            failed=self._note_failure,
            close=self._close_training,
            abandons=(WaitAbandonedError,),
        )

    def _pending_requests(self) -> frozenset[str]:
        """Raise what the last update left to be raised, and return what was asked for in it."""
        self.settle()
        # The epoch has been counted since the last update.
        self._session.beat(self.state.train.global_step, self.state.train.epoch)
        return self.ballot.settle()

    def _finish_training(self) -> None:
        train, session = self.state.train, self._session
        if not self.saver.is_saved:
            self.save_checkpoint()
        if session.stop_reason is None and self.config.checkpoint.last_save_model_only:
            self.export_model()
        self.write_results()
        # On all ranks, so that an error of the background writer is raised on all of them.
        self.checkpoint_manager.wait()
        self._say_ending(session.hear_late_signals(self.placement.optimizer))
        session.exit_if_signalled(train.global_step)

    def _close_training(self) -> None:
        self._reporter.end()
        self._reporter.flush()
        if self.fault_tolerance is not None:
            # A group that stays and does not train would hold the others up.
            self.fault_tolerance.leave()

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

    def _note_failure(self, error: Exception) -> None:
        if isinstance(error, QuorumError):
            self._save_before_leaving()
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
        if not self._session.running:
            super().save_checkpoint(history=history, save_best=save_best)
            return
        with self._reporter.aside("checkpoint"):
            super().save_checkpoint(history=history, save_best=save_best)
        self._reporter.trackers.flush()

    def _after_update(self, outcome: UpdateOutcome) -> None:
        """What happens at every update boundary, besides evaluation and periodic checkpoints."""
        train, session, boundaries = self.state.train, self._session, self._boundaries
        step = train.global_step
        if self._reporter.telemetry is not None:
            self._reporter.telemetry.stepped(committed=outcome.committed)
        if outcome.committed:
            if not session.updated_once:
                self._tighten_timeout()
            if boundaries.log_due(step):
                self._log_update(outcome)
        # A skipped update is work that was done as well, on all ranks.
        session.updated(step, train.epoch)
        self._reporter.stepped(step)
        if session.save_requested:
            # Where an evaluation is due first, the checkpoint follows it, so that a resumed run does not leave the evaluation out.
            evaluates = self.is_step_mode and outcome.committed
            if not (evaluates and boundaries.evaluation_due(step, final=step == self.steps)):
                self.save_checkpoint()
                session.save_requested = False

    def _tighten_timeout(self) -> None:
        if self.compilation is not None and self.is_main_process:
            self.compilation.warn_without_graph()
        # Compilation and the first data make the first update slow; the limit that catches a hang begins after it, everywhere.
        self._session.updated_once = True
        limit = self.config.comm.train_timeout_seconds
        if limit is not None and self.distributed:
            self.world.barrier()
            set_collective_timeout(limit, self.training_groups())

    def training_groups(self) -> Sequence[Any]:
        """Return the process groups that training communicates over; `None` is the default one.

        No communication: may be called on one rank.
        """
        return [None]
