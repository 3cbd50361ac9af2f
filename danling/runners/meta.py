"""Construction of a runner: run the user's `__init__`, then finish what it set up. Verbs that a user calls directly: what the loops do
around a verb is done around it then too, also if it is overridden."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial, wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

from danling.checkpoints.errors import CheckpointError
from danling.data import Batch

from .names import GUARDED, check_class

if TYPE_CHECKING:
    from .torch_runner import TorchRunner

logger = logging.getLogger("danling")


class MetaRunner(type):
    """Calls `__post_init__` once after the outermost `__init__` has returned, and closes a runner that failed to come up.

    A subclass puts model, data and optimizer on itself after `super().__init__(config)`; only when all of its `__init__` has run
    can they be moved, wrapped and restored, so no class in the chain could do it from its own `__init__`.

    The verbs of every class may be called directly, see `prepare_direct_calls`.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        # A class made by `type(name, bases, methods)` belongs to the module that asked for it, not to this one.
        namespace.setdefault("__module__", sys._getframe(1).f_globals.get("__name__", "__main__"))
        prepare_direct_calls(namespace)
        return super().__new__(mcs, name, bases, namespace, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What the class is constructed with, as help and notebooks show it: the arguments of its `__init__`."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        runner: Any = cls.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]
        try:
            _initialize(runner, *args, **kwargs)
            check_class(runner)
            runner.__post_init__()
        except BaseException:
            close_after_error(runner)
            raise
        return runner


def _initialize(runner: Any, *args: Any, **kwargs: Any) -> None:
    """Run the user's `__init__`; without that of the library nothing of it is there."""
    forgotten = None
    try:
        runner.__init__(*args, **kwargs)
    except AttributeError as error:
        if "_closers" in vars(runner) or error.obj is not runner:
            raise
        forgotten = error
    finally:
        vars(runner).pop(GUARDED, None)
    if "_closers" not in vars(runner):
        name = type(runner).__name__
        raise TypeError(
            f"Expected {name}.__init__ to call super().__init__(config) first. Received: an __init__ that did not. Add it."
        ) from forgotten
    config = args[0] if args else kwargs.get("config")
    if isinstance(config, Mapping) and not runner._was_given_config:
        raise TypeError(
            f"{type(runner).__name__}.__init__ received a configuration and called super().__init__() without it. Call "
            "super().__init__(config)."
        )


def close_after_error(runner: Any) -> None:
    """Close a runner after a failure: nothing that goes wrong here hides the user's exception. Called on every rank that failed."""
    try:
        if "_closers" in vars(runner):
            runner.close()
    except CheckpointError as error:
        # Its message names the problem and the fix; the exception after it may be the end that a signal has asked for.
        logger.error("Closing failed as well: %s", error)
    except Exception:
        logger.exception("Closing after a failure failed as well; the failure itself follows.")


# Direct calls

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
    runner._data.check(split)
    runner._data.agree_lengths()
    with loop.training(whole=False):
        return loop.train_epoch_directly(split, partial(call, split, *args, **kwargs), runner.train_splits)
