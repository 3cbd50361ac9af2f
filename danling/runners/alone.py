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

    A runner that has a method `_alone_<verb>(call, *args, **kwargs)` is asked by it to run `call` prepared, and says by
    `_called_alone(verb)` whether that is due; without one nothing is prepared.

    Args:
        namespace: The attributes of the class that is being made.
    """
    for verb in VERBS:
        if isinstance(namespace.get(verb), FunctionType):
            namespace[verb] = _standalone(verb, namespace[verb])


def _standalone(verb: str, function: Callable[..., object]) -> Callable[..., Any]:
    prepared = f"_alone_{verb}"

    @wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        if not hasattr(self, prepared) or not self._called_alone(verb):
            return function(self, *args, **kwargs)
        return getattr(self, prepared)(partial(function, self), *args, **kwargs)

    return method
