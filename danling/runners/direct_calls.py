"""Methods of a runner that a program calls itself: they prepare what a loop of the library would, on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from danling.data import Batch
from danling.training.evaluation import EvaluationMode
from danling.training.precision import NO_CONTEXT

from .parts import TorchParts
from .reserved_names import GUARDED

if TYPE_CHECKING:
    from .base_runner import BaseRunner
    from .torch_runner import TorchRunner

_Save = TypeVar("_Save", bound=Callable[..., None])

VERBS = ("train_epoch", "train_step", "step", "evaluate_step", "infer_step")
"""Verbs around which the loops prepare something: a session, a micro-batch of the window, an update, evaluation mode."""


def preparing(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Return an override of a user's that prepares itself when no loop has called it, as the library's own method does."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        parts = self._parts
        session = parts.session
        # The loops call too: in an update, this wrapper costs no more than these comparisons.
        in_loop = session.in_step or (verb == "step" and session.in_update)
        # A runner without a loop of the library prepares nothing.
        if in_loop or not isinstance(parts, TorchParts):
            return function(self, *args, **kwargs)
        return prepared(self, verb, functools.partial(function, self), *args, **kwargs)

    return method


def prepared(
    runner: TorchRunner, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a verb outside of `train_step` and `step`, and prepare what a loop would have if it has not."""
    parts = runner._parts
    session = parts.session
    if verb == "step":
        if session.running or parts.calls is None:
            return session.update(call)
        with parts.calls.explaining():
            return session.update(call)
    if verb == "train_epoch" and not session.running:
        return _train_epoch(runner, call, *args, **kwargs)
    if verb == "train_step":
        return _train_step(runner, call, *args, **kwargs)
    if verb in ("evaluate_step", "infer_step") and runner.mode == "train":
        mode: EvaluationMode = "evaluate" if verb == "evaluate_step" else "infer"
        return parts.evaluator.call(mode, call, *args, **kwargs)
    return call(*args, **kwargs)


def together(runner: BaseRunner, verb: str) -> AbstractContextManager[object]:
    """Return the context of a call that all ranks begin together, and whose error says so if they do not."""
    if GUARDED in vars(runner):
        raise ValueError(
            f"Expected `{verb}` to be called on a constructed runner: model, optimizer and loaders are prepared when __init__ has "
            f"ended. Received: a call in __init__, which is too early. Call runner.{verb}() after the construction."
        )
    calls = runner._parts.calls
    return NO_CONTEXT if calls is None else calls.making(verb)


def met(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    """Return an override of a user's in the context `together`, which the library's own method enters itself."""

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        with together(self, verb):
            return function(self, *args, **kwargs)

    return method


def without_name(save: _Save) -> _Save:
    """Return `save_checkpoint` with an error for the name of a file, which other trainers' methods take."""

    @functools.wraps(save)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        if args:
            raise TypeError(
                f"Expected save_checkpoint() without a name: it saves the full state as `latest`, and as history and best where that "
                f"applies. Received: {args[0]!r}. For the weights in a file of your choice call runner.save_pretrained(directory), or run "
                "`danling export CHECKPOINT FILE`."
            )
        with together(self, "save_checkpoint"):
            return save(self, **kwargs)

    return cast(_Save, method)


def _train_step(runner: TorchRunner, call: Callable[[Any], Any], data: object) -> Any:
    parts = runner._parts
    parts.checks.check_optimizer_given()
    if not parts.session.running:
        if runner.fault_tolerance is not None:
            raise ValueError(
                "Expected a loop around `train_step` with ft.enabled, which agrees on each update with the other replica groups. "
                "Received: a call of `train_step` alone. Call `train_epoch(split)` or `train()`."
            )
        # Once a window: what a loop of the library does before an update.
        if runner.window.count == 0:
            if parts.calls is not None:
                parts.calls.note_loop()
            parts.session.start()
            parts.loop.begin_updates()
            # A program may have evaluated by hand before.
            if not runner.model.training:
                runner.model.train()
    # The library knows neither its place nor its number of samples.
    batch = Batch(data, None, None)
    if parts.calls is None:
        return parts.update.run(batch, call)
    with parts.calls.explaining():
        return parts.update.run(batch, call)


def _train_epoch(
    runner: TorchRunner, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any
) -> Any:
    parts = runner._parts
    loop, data = parts.loop, parts.data
    loop.check_trainable()
    data.check(split)
    data.agree_lengths()
    parts.checks.note_stopped()
    with loop.training(whole=False):
        return loop.train_epoch_directly(
            split, functools.partial(call, split, *args, **kwargs), runner.train_splits
        )
