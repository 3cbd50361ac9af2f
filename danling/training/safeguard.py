"""Evaluating in the middle of training without losing what was trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

logger = logging.getLogger("danling")


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
        # KeyboardInterrupt and SystemExit lose as much as an error does.
        what = f"The evaluation after step {step} failed with {type(error).__name__}"
        try:
            saved = save()
        except Exception:
            logger.exception("%s, and what was trained could not be saved; the failure follows.", what)
        else:
            if saved:
                logger.error(
                    "%s. What was trained is saved; a run that goes on from it begins with this evaluation.", what
                )
            else:
                logger.error(
                    "%s. What was trained since the last checkpoint is lost: it takes all ranks to save it.", what
                )
        raise


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
