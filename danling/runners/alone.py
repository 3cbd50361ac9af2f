"""Verbs that are called by themselves: what the loops do around a verb is done around it then too, whoever has overridden it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType
from typing import Any

VERBS = ("train_epoch", "train_step", "evaluate_step", "infer_step")
"""Verbs around which the loops prepare something: a session, a micro-batch of the window, evaluation mode."""


def make_standalone(namespace: dict[str, Any]) -> None:
    """Replace the verbs among the methods of a class by ones that prepare themselves when no loop has called them.

    The parts of a runner say whether that is due and run the verb prepared; a runner without parts prepares nothing.

    Args:
        namespace: The attributes of the class that is being made.
    """
    for verb in VERBS:
        if isinstance(namespace.get(verb), FunctionType):
            namespace[verb] = _standalone(verb, namespace[verb])


def _standalone(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    @wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        parts = self._parts
        # Within a step, which is where it costs, no call tells it.
        if parts is None or self._session.in_step or not parts.is_alone(verb):
            return function(self, *args, **kwargs)
        return parts.run_alone(verb, partial(function, self), *args, **kwargs)

    return method
