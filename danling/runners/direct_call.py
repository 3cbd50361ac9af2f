"""Verbs that a user calls directly: what the loops do around a verb is done around it then too, also if it is overridden."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

from danling.data import Batch

if TYPE_CHECKING:
    from .torch_runner import TorchRunner

VERBS = ("train_epoch", "train_step", "step", "evaluate_step", "infer_step")
"""Verbs around which the loops prepare something: a session, a micro-batch of the window, an update, evaluation mode."""


def prepare_direct_calls(namespace: dict[str, Any]) -> None:
    """Replace the verbs among the methods of a class by ones that prepare themselves when no loop has called them.

    A runner without parts, which has no loop of the library, prepares nothing.
    """
    for verb in VERBS:
        if isinstance(namespace.get(verb), FunctionType):
            namespace[verb] = _preparing(verb, namespace[verb])


def _preparing(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    @wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        # Within a step, which is where it costs, no call tells it.
        if self._parts is None or self._session.in_step or not _is_direct(self, verb):
            return function(self, *args, **kwargs)
        return _call(self, verb, partial(function, self), *args, **kwargs)

    return method


def _is_direct(runner: TorchRunner, verb: str) -> bool:
    """Whether no loop has called a verb, outside of a `train_step`."""
    if verb == "step":
        return not runner._session.in_update
    if verb == "train_epoch":
        return not runner._session.running
    return verb == "train_step" or runner.mode == "train"


def _call(runner: TorchRunner, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a verb as the loops do."""
    if verb == "train_epoch":
        return _train_epoch(runner, call, *args, **kwargs)
    if verb == "train_step":
        return _train_step(runner, call, *args, **kwargs)
    if verb == "step":
        return runner._session.update(call)
    evaluator = runner._parts.evaluator
    return evaluator.call("evaluate" if verb == "evaluate_step" else "infer", call, *args, **kwargs)


def _train_step(runner: TorchRunner, call: Callable[[Any], Any], data: object) -> Any:
    parts = runner._parts
    parts.checks.check_optimizer_given()
    if not runner._session.running:
        if runner.fault_tolerance is not None:
            raise ValueError(
                "Expected a loop around `train_step` with ft.enabled, which agrees on each update with the other replica groups. "
                "Received: a call of `train_step` alone. Call `train_epoch(split)` or `train()`."
            )
        if runner.window.count == 0:
            runner._session.start()
            parts.loop.begin_updates()
            if not runner.model.training:
                runner.model.train()
    return parts.update.run(Batch(data, None, None), call)


def _train_epoch(runner: TorchRunner, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
    loop = runner._parts.loop
    loop.check_trainable()
    runner._data.splits.check(split)
    runner._data.agree_lengths(runner.placement.optimizer)
    with loop.training(whole=False):
        return loop.train_epoch_directly(split, partial(call, split, *args, **kwargs), runner.train_splits)
