"""Optimizers that keep other weights in training than those to evaluate and to save, as schedule-free ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .joint import JointOptimizer


def modal(optimizer: Any) -> list[Any]:
    """Return the optimizers with methods `train` and `eval`, which exchange the weights: of several in one, and inside of a wrapper."""
    if isinstance(optimizer, JointOptimizer):
        return [found for member in optimizer.optimizers for found in modal(member)]
    inner = getattr(optimizer, "optimizer", None)
    if inner is not None and type(optimizer).__module__.startswith("accelerate."):
        return modal(inner)  # its wrapper has both methods whatever it wraps
    has_both = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    return [optimizer] if has_both else []


def enter_training(optimizer: Any) -> None:
    """Put the weights of training into the model. Outside of `evaluation_weights` they are always there."""
    for member in modal(optimizer):
        member.train()


@contextmanager
def evaluation_weights(optimizer: Any) -> Iterator[None]:
    """Put the weights to evaluate into the model, and those of training back on exit, bit for bit.

    The optimizer computes each from the other with a rounding: a copy of the weights is kept, so that an evaluation leaves no trace.
    Where the weights to evaluate are there already, they stay, on exit too.
    """
    members = modal(optimizer)
    if not members:
        yield
        return
    found = _copies(members)
    trains = _are_training(members, found)
    if trains:
        for member in members:
            member.eval()
    try:
        yield
    finally:
        if trains:
            for member in members:
                member.train()
            _put(found)


def _are_training(members: list[Any], found: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether the weights of training are in the model: then `train` changes nothing."""
    for member in members:
        member.train()
    # NaN is not equal to itself, and does not count as changed.
    if all(bool(((parameter == value) | parameter.isnan()).all()) for parameter, value in found):
        return True
    for member in members:
        member.eval()
    _put(found)
    return False


def training_weights(optimizer: Any) -> list[Tensor]:
    """Return the parameters whose weights of training are not those to evaluate.

    There are none before the first update, nor where the weights to evaluate are in the model: the optimizer computes the others.
    """
    members = [member for member in modal(optimizer) if member.state]
    return _parameters(members) if _are_training(members, _copies(members)) else []


def put_training_weights(optimizer: Any, weights: list[tuple[Tensor, Tensor]]) -> None:
    """Enter training after a state was loaded, with the very weights that it was saved with."""
    enter_training(optimizer)
    _put(weights)


def _copies(members: list[Any]) -> list[tuple[Tensor, Tensor]]:
    return [(parameter, parameter.detach().clone()) for parameter in _parameters(members)]


def _parameters(members: list[Any]) -> list[Tensor]:
    return [parameter for member in members for group in member.param_groups for parameter in group["params"]]


@torch.no_grad()
def _put(weights: list[tuple[Tensor, Tensor]]) -> None:
    for parameter, value in weights:
        parameter.copy_(value)
