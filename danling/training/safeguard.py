"""Evaluating in the middle of training without losing what was trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from danling.distributed import all_arrive

from .saving import RunSaver

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank whose evaluation failed waits to hear whether those of all ranks did."""


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


@dataclass(eq=False)
class TrainedKeeper:
    """Makes ready, before an evaluation, for saving what was trained where the evaluation fails on any rank."""

    saver: RunSaver
    """Knows where the last save stands."""
    _: KW_ONLY
    manager: Callable[[], Any]
    """Returns what writes checkpoints."""
    state: Callable[[], Mapping[str, Any]]
    """Returns the full state. Called on all ranks."""
    settle: Callable[[], None]
    """Raises what an update left to be checked. Called on all ranks."""
    save: Callable[[], None]
    """Saves the full state as the latest, never as the best."""
    may_write: Callable[[], bool]
    """Returns whether the run writes checkpoints."""
    may_save_ahead: Callable[[], bool]
    """Returns whether a save may be made before the evaluation."""
    several: Callable[[], bool]
    """Returns whether ranks that may fail one by one hold the state together."""
    aside: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns the context that leaves a save out of the speed of training."""
    _failures: int = field(default=0, init=False)

    def make_ready(self) -> Callable[[], bool]:
        """Return what saves the state as it is now after a failure of this rank, when the others may be anywhere.

        A save that takes all ranks begins here, since one that fails finds nobody to make it with.
        """
        saver, manager, (step, epoch) = self.saver, self.manager(), self.saver.at
        if saver.is_saved or not self.may_write():
            return lambda: saver.saved_at == (step, epoch)
        alone = getattr(manager, "save_alone", None)
        ahead = getattr(manager, "save_ahead", None) if self.may_save_ahead() else None
        if self.several() and alone is not None:
            # Gathered now, since a rank that fails finds nobody to gather it from.
            self.settle()
            payload = self.state()
            return lambda: bool(alone(payload, epoch=epoch, global_step=step))
        if self.several() and ahead is not None:
            with self.aside():
                self.settle()
                ahead(self.state(), epoch=epoch, global_step=step)
            saved: Callable[[], bool] = manager.is_saved_ahead
            return saved
        return self._save_together

    def _save_together(self) -> bool:
        self._failures += 1
        if not all_arrive(f"failed/{self._failures}", seconds=_PATIENCE_SECONDS):
            return False
        self.save()
        self.manager().wait()
        return True


@contextmanager
def preserved_tensors(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Put the values of tensors back on exit, also after an error, such as those of buffers that a forward may write to.

    Args:
        tensors: The tensors, of this rank.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in kept:
                tensor.copy_(before)
