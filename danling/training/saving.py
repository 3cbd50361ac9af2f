"""Saving a run: when the full state counts as saved, what refuses a save, and what is saved if an evaluation fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from danling.checkpoints.torch_files import FORMAT_VERSION
from danling.distributed import all_arrive
from danling.reporting import format_number
from danling.utils.tensors import floating_dtype

from .extension import Extension
from .session import TrainingSession
from .update import NonFiniteError

if TYPE_CHECKING:
    from danling.remote.attach import RemoteStores
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""


class RunSaver:
    """Saves the full state of a run, and remembers at which position it was saved.

    Attributes:
        before: Called before a save; what they raise refuses it.
        saved: Called after a save.
        loaded: Called after the run was restored from a checkpoint on disk.
        checks: Called before the state is read for a save; what they raise refuses it.
        saved_at: Updates, epochs and attempted updates at the last save.
        best_elsewhere: Index of the best score, where its checkpoint is not among the run's own.
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
        self.best_elsewhere: int | None = None
        self._failures = 0

    @property
    def at(self) -> tuple[int, int]:
        """Updates and epochs of the run as it is now."""
        counters = self._runner.state.train
        return counters.global_step, counters.epoch

    @property
    def is_saved(self) -> bool:
        """Whether the last save was made at the present position; a skipped update is past the samples of one."""
        return self.saved_at == self._position

    @property
    def _position(self) -> tuple[int, int, int]:
        return *self.at, self._runner.state.train.attempted

    def save(self, *, history: bool = False, best: bool = False) -> None:
        """Save the full state. Called on all ranks."""
        runner = self._runner
        self.open = history, best
        with self._session.saving():
            for check in (*self.checks, *self.before):
                check()
            step, epoch = self.at
            if self._writes():
                runner.checkpoint_manager.save_checkpoint(
                    runner.checkpoint_state(), epoch=epoch, global_step=step, history=history, best=best
                )
            else:
                # As a save does, so that all replica groups continue with equal buffers.
                runner.broadcast_buffers()
            self.saved_at = self._position
            for action in self.saved:
                action()
        self.open = None

    def save_last(self, *, signalled: bool) -> bool:
        """Save where a training ends, unless that is saved, and return whether it is. Called on all ranks.

        After a signal, weights that are not finite are an error in the log only: the process ends with the exit code of the signal, and
        the checkpoint before stays the last one.
        """
        if not self.is_saved:
            try:
                self._runner.save_checkpoint()
            except NonFiniteError as error:
                if not signalled:
                    raise
                logger.error("%s", error)
                return False
        return True

    def _writes(self) -> bool:
        """Whether this replica group writes; another one may."""
        # Each one is asked, since it may agree with other ranks.
        answers = [extension.saves() for extension in self._extensions]
        return all(answers)

    def export(self) -> None:
        """Write weights only, floating ones in the dtype that `checkpoint.export_dtype` names. Called on all ranks."""
        if not self._writes():
            return
        runner, (step, epoch) = self._runner, self.at
        name = runner.config.checkpoint.export_dtype
        dtype = None if name is None else floating_dtype(name, key="checkpoint.export_dtype")

        def cast(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                key: w.to(dtype) if dtype is not None and w.is_floating_point() else w for key, w in weights.items()
            }

        weights = runner.model_state_dict()
        payload = {"format_version": FORMAT_VERSION, "runner": runner.config.public(), "model": cast(weights)}
        if runner.ema is not None:
            averages = cast(runner.ema.weights)
            if dtype is None:
                # They are kept in float32, also of a narrower model.
                averages = {name: average.to(weights[name].dtype) for name, average in averages.items()}
            payload["ema"] = {**runner.ema.state_dict(), "weights": averages}
        runner.checkpoint_manager.export_model(payload, epoch=epoch, global_step=step)

    def note_loaded(self, source: object) -> None:
        """Note that the run was restored from a checkpoint on disk. Called on all ranks."""
        # The store is asked by one rank, and fails all of them where it fails that one.
        self.best_elsewhere = self._runner.world.on_first(
            lambda: warn_if_best_is_elsewhere(self._runner, source, self.stores)
        )
        self.saved_at = self._position
        for action in self.loaded:
            action()

    @contextmanager
    def keeping_trained(self, *, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Save what was trained when an evaluation inside fails, then let the failure go on its way. Called on all ranks."""
        save, step = self.prepare_emergency_save(), self.at[0]
        try:
            yield
        except passing:
            raise
        except BaseException as error:
            # KeyboardInterrupt and SystemExit, by which schedulers of trials end a training, lose as much as an error does.
            failed = isinstance(error, Exception)
            what = (
                f"The evaluation after step {step} {'failed with' if failed else 'was ended by'} {type(error).__name__}"
            )
            try:
                saved = save()
            except Exception:
                logger.exception("%s, and what was trained could not be saved; the failure follows.", what)
            else:
                then = "What was trained since the last checkpoint is lost: it takes all ranks to save it."
                if saved:
                    then = "What was trained is saved; a run that resumes from it begins with this evaluation."
                logger.log(logging.WARNING if saved and not failed else logging.ERROR, "%s. %s", what, then)
            raise

    def prepare_emergency_save(self) -> Callable[[], bool]:
        """Return what saves the state as it is now after a failure of this rank, and returns whether that worked. Called on all ranks.

        A rank that fails finds no other rank to save with, if it fails alone. So a state that takes all ranks to gather, or to write, is
        gathered or written here.
        """
        runner, settings, (step, epoch) = self._runner, self._runner.config.checkpoint, self.at
        if self.is_saved or settings.load_only:
            return lambda: self.saved_at is not None and self.saved_at[:2] == (step, epoch)
        manager = runner.checkpoint_manager
        # Of the ranks of a replica group, all fail or none.
        may_fail_alone = runner.world_size > 1 and runner.fault_tolerance is None
        is_able = hasattr(manager, "prepare_emergency_save") and (
            settings.before_evaluation or manager.saves_on_main_only
        )
        if not (may_fail_alone and is_able):
            return self._save_together
        with self._session.saving():
            for check in self.checks:
                check()
            save: Callable[[], bool] = manager.prepare_emergency_save(
                runner.checkpoint_state(), epoch=epoch, global_step=step
            )
        return save

    def _save_together(self) -> bool:
        self._failures += 1
        if not all_arrive(f"failed/{self._failures}", seconds=_PATIENCE_SECONDS):
            return False
        self._runner.save_checkpoint(save_best=False)
        self._runner.checkpoint_manager.wait()
        return True


def warn_if_best_is_elsewhere(runner: BaseRunner, source: object, stores: RemoteStores | None) -> int | None:
    """Return the index of the best score if its checkpoint is next to the one that was loaded, not among the run's own, and log it.

    May be called on one rank, which asks the object store.
    """
    index = runner.best_index
    here = any((runner.workspace.checkpoints / name).exists() for name in ("best", "best.pth"))
    if index is None or here or (stores is not None and stores.has("best")):
        return None
    if runner.is_main_process:
        logger.info(
            "The best score so far, %s at %d, was kept next to %s; here a best is kept from the next better one on.",
            format_number(runner.best_score or 0.0),
            index,
            source,
        )
    return index
