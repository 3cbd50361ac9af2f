"""Saves a run, chooses the checkpoint that a run begins from, and saves trained weights if an evaluation fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from danling.checkpoints import CheckpointDamaged, CheckpointDiskError, CheckpointNotFound
from danling.distributed import all_arrive
from danling.reporting import format_number

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""
_ATTEMPTS_TO_READ = 3


class RunSaver:
    """Saves the full state of a run, and remembers at which position it was saved.

    Attributes:
        before: Called before a save; what they raise refuses it.
        saved: Called after a save.
        loaded: Called after the run was restored from a checkpoint on disk.
        saved_at: Updates and epochs at the last save.
        best_elsewhere: Index of the best score, where its checkpoint is not among the run's own.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self.before: list[Callable[[], None]] = []
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
        runner: Any = self._runner
        with runner._session.saving():
            if runner._parts is not None:
                # Weights must not be saved while the check of the last update is pending.
                runner._parts.update.raise_pending_error()
            for check in self.before:
                check()
            step, epoch = self.at
            if self._writes():
                runner.checkpoint_manager.save_checkpoint(
                    runner.checkpoint_state(), epoch=epoch, global_step=step, history=history, best=best
                )
            else:
                # As a save does, so that all replica groups continue with equal buffers.
                runner.broadcast_buffers()
            self.saved_at = self.at
            for action in self.saved:
                action()

    def _writes(self) -> bool:
        """Whether this replica group writes; another one may."""
        member: Any = getattr(self._runner, "fault_tolerance", None)
        return member is None or bool(member.writes())

    def export(self, weights: Callable[[], Mapping[str, object]]) -> None:
        """Write weights only. Called on all ranks."""
        if self._writes():
            step, epoch = self.at
            self._runner.checkpoint_manager.export_model(weights(), epoch=epoch, global_step=step)

    def note_loaded(self) -> None:
        """Note that the run was restored from a checkpoint on disk. Called on all ranks."""
        self.saved_at = self.at
        for action in self.loaded:
            action()


# The beginning of a run


def restore_run(runner: BaseRunner) -> None:
    """Load what the configuration names: `resume`, else `auto_resume`, else `pretrained`. Called on all ranks."""
    config, manager = runner.config, runner.checkpoint_manager
    if not config.checkpoint.load_only:
        # Check now rather than at the first save. Replica groups share the directory, where another group may be writing: no tidying.
        if not config.ft.enabled:
            manager.on_main(manager.checkpoints.tidy)
        manager.on_main(manager.checkpoints.refuse_foreign)
    for _ in range(_ATTEMPTS_TO_READ - 1 if config.ft.enabled and config.auto_resume else 0):
        with suppress(CheckpointDamaged, CheckpointNotFound):
            # Another replica group may replace a checkpoint between finding and reading it; then there is a newer one.
            return _load_first(runner)
    _load_first(runner)


def _load_first(runner: BaseRunner) -> None:
    config, manager = runner.config, runner.checkpoint_manager
    source = config.resume or (manager.find_latest() if config.auto_resume else None)
    while source:
        try:
            runner.load_checkpoint(source)
            return
        except (CheckpointDamaged, CheckpointDiskError) as error:
            if config.resume:
                raise
            # It is the newest whose files are as they were written, and still cannot be read.
            manager.on_main(partial(manager.checkpoints.skip, source, error))
        source = manager.find_latest()
    if config.auto_resume:
        manager.on_main(manager.checkpoints.refuse_lost)
        directory = runner.workspace.checkpoints
        logger.info("auto_resume: no checkpoint of this run in %s yet; starting from scratch.", directory)
    if config.pretrained:
        runner.load_pretrained(config.pretrained)


def warn_if_best_is_elsewhere(runner: BaseRunner, source: object) -> int | None:
    """Return the index of the best score if its checkpoint is next to the one that was loaded, not among the run's own, and log it.

    May be called on one rank, which asks the object store.
    """
    index = runner.best_index
    here = any((runner.workspace.checkpoints / name).exists() for name in ("best", "best.pth"))
    if index is None or here or (runner._has_remote() and runner._remote.has("best")):
        return None
    if runner.is_main_process:
        logger.info(
            "The best score so far, %s at %d, was kept next to %s; here a best is kept from the next better one on.",
            format_number(runner.best_score or 0.0),
            index,
            source,
        )
    return index


# An evaluation that fails


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
    """Save what was trained when something inside fails, then let the failure go on its way."""
    try:
        yield
    except passing:
        raise
    except BaseException as error:
        # KeyboardInterrupt and SystemExit, by which schedulers of trials end a training, lose as much as an error does.
        failed = isinstance(error, Exception)
        what = f"The evaluation after step {step} {'failed with' if failed else 'was ended by'} {type(error).__name__}"
        try:
            saved = save()
        except Exception:
            logger.exception("%s, and what was trained could not be saved; the failure follows.", what)
        else:
            then = "What was trained since the last checkpoint is lost: it takes all ranks to save it."
            if saved:
                then = "What was trained is saved; a run that goes on from it begins with this evaluation."
            logger.log(logging.WARNING if saved and not failed else logging.ERROR, "%s. %s", what, then)
        raise
