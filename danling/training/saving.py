"""Saves a run: what is checked before a save, who writes, at which update the last save was made, and what an evaluation cannot lose."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from danling.distributed import all_arrive

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""


class RunSaver:
    """Saves the full state of a run, and remembers at which position it was saved.

    Attributes:
        around: Returns the context of a save.
        before: Called before a save; what they raise refuses it.
        writes: Whether this replica group writes; another one may.
        instead: Called where it does not.
        is_scored: Whether the present state was evaluated.
        saved: Called after a save.
        loaded: Called after the run was restored from a checkpoint on disk.
        saved_at: Updates and epochs at the last save.
        best_elsewhere: Index of the best score, where its checkpoint is not among the run's own.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
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
        counters = self._runner.state.train
        return counters.global_step, counters.epoch

    @property
    def is_saved(self) -> bool:
        """Whether the last save was made at the present position."""
        return self.saved_at == self.at

    def save(self, *, history: bool = False, best: bool = False) -> None:
        """Save the full state. Called on all ranks."""
        runner = self._runner
        with self.around():
            for check in self.before:
                check()
            step, epoch = self.at
            if self.writes():
                runner.checkpoint_manager.save_checkpoint(
                    runner.checkpoint_state(), epoch=epoch, global_step=step, history=history, best=best
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
            self._runner.checkpoint_manager.export_model(weights(), epoch=epoch, global_step=step)

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


class TrainedKeeper:
    """Makes ready, before an evaluation, for saving what was trained where the evaluation fails on any rank."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._failures = 0

    def make_ready(self) -> Callable[[], bool]:
        """Return what saves the state as it is now after a failure of this rank, when the others may be anywhere.

        A save that takes all ranks begins here, since one that fails finds no other rank to make it with.
        """
        runner, saver, settings = self._runner, self._runner.saver, self._runner.config.checkpoint
        step, epoch = saver.at
        if saver.is_saved or settings.load_only:
            return lambda: saver.saved_at == (step, epoch)
        # Ranks that may fail one by one, and have the state together.
        if runner.world_size > 1 and runner.fault_tolerance is None:
            manager: Any = runner.checkpoint_manager
            if hasattr(manager, "save_alone"):
                # Gathered now, since a rank that fails finds no other rank to gather it from.
                runner._parts.update.raise_pending_error()
                with runner._session.saving():
                    payload = runner.checkpoint_state()
                return lambda: bool(manager.save_alone(payload, epoch=epoch, global_step=step))
            if settings.before_evaluation and hasattr(manager, "save_ahead"):
                with runner._session.saving():
                    runner._parts.update.raise_pending_error()
                    manager.save_ahead(runner.checkpoint_state(), epoch=epoch, global_step=step)
                saved: Callable[[], bool] = manager.is_saved_ahead
                return saved
        return self._save_together

    def _save_together(self) -> bool:
        self._failures += 1
        if not all_arrive(f"failed/{self._failures}", seconds=_PATIENCE_SECONDS):
            return False
        self._runner.save_checkpoint(save_best=False)
        self._runner.checkpoint_manager.wait()
        return True


@contextmanager
def keeping_trained(
    save: Callable[[], bool], *, step: int, passing: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Save what was trained when something inside fails, then let the failure go on its way.

    Args:
        save: Saves the state as it was on entry, and returns whether it could. Called on each rank that fails, while the others may
            be anywhere. What it raises is logged, so that the failure is what is seen.
        step: Committed updates, for the log.
        passing: Exceptions that are no failures.
    """
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        # KeyboardInterrupt and SystemExit, by which schedulers of trials end a training, lose as much as an error does.
        failed = isinstance(error, Exception)
        how = "failed with" if failed else "was ended by"
        what = f"The evaluation after step {step} {how} {type(error).__name__}"
        try:
            saved = save()
        except Exception:
            logger.exception("%s, and what was trained could not be saved; the failure follows.", what)
        else:
            if saved:
                logger.log(
                    logging.ERROR if failed else logging.WARNING,
                    "%s. What was trained is saved; a run that goes on from it begins with this evaluation.",
                    what,
                )
            else:
                logger.error(
                    "%s. What was trained since the last checkpoint is lost: it takes all ranks to save it.", what
                )
        raise
