"""Verbs that are called by themselves: what the loops do around a verb is done around it then too, whoever has overridden it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

from danling.data import Batch

if TYPE_CHECKING:
    from .assembly import TorchParts
    from .torch_runner import TorchRunner

VERBS = ("train_epoch", "train_step", "step", "evaluate_step", "infer_step")
"""Verbs around which the loops prepare something: a session, a micro-batch of the window, evaluation mode."""


def make_standalone(namespace: dict[str, Any]) -> None:
    """Replace the verbs among the methods of a class by ones that prepare themselves when no loop has called them.

    The parts of a runner say whether that is due and run the verb prepared; a runner without parts prepares nothing.
    """
    for verb in VERBS:
        if isinstance(namespace.get(verb), FunctionType):
            namespace[verb] = _standalone(verb, namespace[verb])


def _standalone(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    @wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        parts = self._parts
        # Within a step, which is where it costs, no call tells it.
        if parts is None or self._session.in_step or not parts.alone.is_due(verb):
            return function(self, *args, **kwargs)
        return parts.alone.run(verb, partial(function, self), *args, **kwargs)

    return method


class LoneVerbs:
    """Runs verbs that no loop has called as the loops do."""

    def __init__(self, runner: TorchRunner, parts: TorchParts) -> None:
        self._runner = runner
        self._parts = parts

    def is_due(self, verb: str) -> bool:
        """Whether no loop has called a verb."""
        session = self._runner._session
        if verb == "step":
            return not session.in_update
        if verb == "train_epoch":
            return not session.running
        return not session.in_step and (verb == "train_step" or self._runner.mode == "train")

    def run(self, verb: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a verb as the loops do."""
        if verb == "train_epoch":
            return self._train_epoch(call, *args, **kwargs)
        if verb == "train_step":
            return self._train_step(call, *args, **kwargs)
        if verb == "step":
            return self._runner._session.update(call)
        return self._parts.evaluator.call("evaluate" if verb == "evaluate_step" else "infer", call, *args, **kwargs)

    def _train_step(self, call: Callable[[Any], Any], data: object) -> Any:
        runner, parts = self._runner, self._parts
        parts.readiness.check_optimizer_given()
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

    def _train_epoch(self, call: Callable[..., Any], split: str = "train", *args: Any, **kwargs: Any) -> Any:
        runner, parts = self._runner, self._parts
        parts.loop.check_trainable()
        runner._data.splits.check(split)
        runner._data.agree_lengths(runner.placement.optimizer)
        with parts.loop.training(whole=False):
            return parts.loop.train_epoch_directly(split, partial(call, split, *args, **kwargs), runner.train_splits)
