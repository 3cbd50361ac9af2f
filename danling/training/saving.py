"""Saving a run: when the full state counts as saved, what refuses a save, and what is saved if an evaluation fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.distributed import MembershipChanged, all_arrive
from danling.reporting import format_number
from danling.utils.tensors import floating_dtype

from .extension import Extension
from .outcome import NonFiniteError
from .session import TrainingSession

if TYPE_CHECKING:
    from danling.remote.attach import RemoteStores
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""


class RunSaver:
    """Saves the full state of a run, and remembers at which position it was saved.

    Attributes:
        checks: Called before the state is read, also where a save is prepared in case an evaluation fails. An exception refuses the save.
        before: Called after `checks`, before a save is made. An exception refuses it.
        saved: Called after a save.
        loaded: Called after the run was restored from a checkpoint on disk.
        saved_at: Updates, epochs and attempted updates at the last save.
        best_elsewhere: Epoch or update of the best score, if its checkpoint is next to the one that was loaded and not in the directory of
            this run; else `None`.
    """

    def __init__(
        self,
        runner: BaseRunner,
        session: TrainingSession,
        extensions: Sequence[Extension],
        stores: RemoteStores | None,
    ) -> None:
        self._runner: Any = runner
        self._session = session
        self._extensions = extensions
        self.stores = stores
        """Object stores, where the run is copied to one."""
        self.checks: list[Callable[[], None]] = []
        self.before: list[Callable[[], None]] = []
        self.saved: list[Callable[[], None]] = []
        self.loaded: list[Callable[[], None]] = []
        self.saved_at: tuple[int, int, int] | None = None
        self.open: tuple[bool, bool] | None = None
        """The save that has begun and not ended: whether it has a history name, and whether it is the best."""
        self._opened_at: tuple[int, int, int] | None = None
        self.best_elsewhere: int | None = None
        self._failures = 0

    @property
    def at(self) -> tuple[int, int]:
        """Updates and epochs of the run as it is now."""
        counters = self._runner.state.train
        return counters.global_step, counters.epoch

    @property
    def is_saved(self) -> bool:
        """Whether the last save was made at the present position. A skipped update moves the position, since the data has advanced."""
        return self.saved_at == self._position

    @property
    def _position(self) -> tuple[int, int, int]:
        return *self.at, self._runner.state.train.attempted

    def save(self, *, history: bool = False, best: bool = False) -> None:
        """Save the full state. Called on all ranks."""
        runner = self._runner
        if self.open is not None and self._opened_at == self._position:
            # One of the same state, earlier in an override of `step`: both are made again as one.
            history, best = history or self.open[0], best or self.open[1]
        # Left set where a rank ends in the save: those that are left make it again.
        self.open, self._opened_at = (history, best), self._position
        try:
            with self._session.saving():
                for check in (*self.checks, *self.before):
                    check()
                step, epoch = self.at
                if self._writes():
                    runner.checkpoint_manager.save_checkpoint(
                        runner.checkpoint_state(),
                        epoch=epoch,
                        global_step=step,
                        history=history,
                        best=best,
                    )
                else:
                    # A save broadcasts the buffers within its group. Groups that do not save do it too: all continue with equal ones.
                    runner.broadcast_buffers()
                # Noted before the actions: the state is saved, even if one of them fails.
                self.saved_at = self._position
                for action in self.saved:
                    action()
        except MembershipChanged:
            # Elsewhere the loop begins again from the state as it is, and makes the save.
            if not self._session.in_update:
                raise
            # What follows in an override of `step` is run once; the save is made again where the ranks have been formed.
            return
        self.open = None

    def save_last(self, *, signalled: bool) -> bool:
        """Save where a training ends, unless that is saved, and return whether it is. Called on all ranks.

        After a signal, weights that are not finite are an error in the log only: the process ends with the exit code of the signal, and
        the checkpoint before stays the last one.
        """
        if self.is_saved:
            return True
        try:
            # That of the runner, which a program may override, and which says whether the score is the best.
            self._runner.save_checkpoint()
        except NonFiniteError as error:
            if not signalled:
                raise
            logger.error("%s", error)
            return False
        return True

    def _writes(self) -> bool:
        """Whether the checkpoint is written here, and not in another replica group."""
        # A list, so that every extension is asked: its answer may be a collective.
        answers = [extension.saves() for extension in self._extensions]
        return all(answers)

    def export(self) -> None:
        """Write weights only, floating ones in the dtype that `checkpoint.export_dtype` names. Called on all ranks."""
        if not self._writes():
            return
        runner = self._runner
        step, epoch = self.at
        name = runner.config.checkpoint.export_dtype
        dtype = None if name is None else floating_dtype(name, key="checkpoint.export_dtype")
        weights = runner.model_state_dict()
        payload = {
            "format_version": FORMAT_VERSION,
            "runner": runner.config.public(),
            "model": {key: _cast(weight, dtype) for key, weight in weights.items()},
        }
        if runner.ema is not None:
            averages = {key: _cast(each, dtype) for key, each in runner.ema.weights.items()}
            if dtype is None:
                # Averages are kept in float32, also those of a narrower model.
                averages = {key: each.to(weights[key].dtype) for key, each in averages.items()}
            payload["ema"] = {**runner.ema.state_dict(), "weights": averages}
        runner.checkpoint_manager.export_model(payload, epoch=epoch, global_step=step)

    def note_loaded(self, source: object) -> None:
        """Note that the run was restored from a checkpoint on disk. Called on all ranks."""
        # Rank 0 asks the object store. If that fails, all ranks raise its error.
        self.best_elsewhere = self._runner.world.on_first(
            lambda: index_of_best_elsewhere(self._runner, source, self.stores)
        )
        self.saved_at = self._position
        for action in self.loaded:
            action()

    @contextmanager
    def keeping_trained(self, *, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Save what was trained if an evaluation inside fails, and raise its error. Called on all ranks.

        Args:
            passing: Exceptions that are no failure: they are raised without a save.
        """
        # Prepared now, while all ranks are here and the model has the weights of training.
        save = self.prepare_emergency_save()
        step, _ = self.at
        try:
            yield
        except passing:
            raise
        except BaseException as error:
            # KeyboardInterrupt and SystemExit, by which a search over settings may end a training, lose as much as an error does.
            has_failed = isinstance(error, Exception)
            ending = "failed with" if has_failed else "was ended by"
            what = f"The evaluation after step {step} {ending} {type(error).__name__}"
            try:
                is_saved = save()
            except Exception:
                logger.exception(
                    "%s, and what was trained could not be saved; the failure follows.", what
                )
            else:
                level = logging.ERROR
                then = "What was trained since the last checkpoint is lost: it takes all ranks to save it."
                if is_saved:
                    level = logging.ERROR if has_failed else logging.WARNING
                    then = "What was trained is saved; a run that resumes from it begins with this evaluation."
                logger.log(level, "%s. %s", what, then)
            raise

    def prepare_emergency_save(self) -> Callable[[], bool]:
        """Return a function that saves the present state after a failure, and returns whether it is saved. Called on all ranks.

        A rank that fails alone cannot save a state that all ranks hold or write. So where a rank may fail alone, the state is gathered or
        written here, before the evaluation, if the checkpoint manager can do that; else the function saves only if all ranks call it.
        """
        runner = self._runner
        settings = runner.config.checkpoint
        step, epoch = self.at
        if self.is_saved or settings.load_only:
            return lambda: self.saved_at is not None and self.saved_at[:2] == (step, epoch)
        manager = runner.checkpoint_manager
        # All ranks of a replica group fail together.
        may_fail_alone = runner.world_size > 1 and runner.fault_tolerance is None
        can_prepare = hasattr(manager, "prepare_emergency_save") and (
            settings.before_evaluation or manager.saves_on_main_only
        )
        if not (may_fail_alone and can_prepare):
            return self._save_together
        with self._session.saving():
            # Not `before`: nothing is saved yet, and most evaluations do not fail.
            for check in self.checks:
                check()
            save: Callable[[], bool] = manager.prepare_emergency_save(
                runner.checkpoint_state(), epoch=epoch, global_step=step
            )
        return save

    def _save_together(self) -> bool:
        """Save if the evaluation has failed on all ranks; return whether it has."""
        # Each failure has another name, since what ranks have written for an earlier one is still in the store.
        self._failures += 1
        if not all_arrive(f"failed/{self._failures}", seconds=_PATIENCE_SECONDS):
            return False
        # Its score is not known: the evaluation has failed.
        self._runner.save_checkpoint(save_best=False)
        self._runner.checkpoint_manager.wait()
        return True


def _cast(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a weight in a dtype; `None`, and weights that are not floating, keep theirs."""
    return weight if dtype is None or not weight.is_floating_point() else weight.to(dtype)


def index_of_best_elsewhere(
    runner: BaseRunner, source: object, stores: RemoteStores | None
) -> int | None:
    """Return the epoch or update of the best score, and log it, if its checkpoint is not in the directory of this run.

    It is then next to the checkpoint that was loaded.

    May be called on one rank, which asks the object store.
    """
    index = runner.best_index
    if index is None:
        return None
    if any((runner.workspace.checkpoints / name).exists() for name in ("best", "best.pth")):
        return None
    # Only now: a run whose checkpoint is on the disk does not depend on the store.
    if stores is not None and stores.has("best"):
        return None
    if runner.is_main_process:
        logger.info(
            "The checkpoint of the best score so far, %s at %d, is next to %s; this run keeps one from its next better score on.",
            format_number(runner.best_score or 0.0),
            index,
            source,
        )
    return index
