"""The runner that takes the class of the configured stack."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .base_runner import BaseRunner
from .config import RunnerConfig

if TYPE_CHECKING:
    # Every stack is a TorchRunner, so a type checker may know its methods; which one it is shows when it is constructed.
    from .torch_runner import TorchRunner as _Base
else:
    _Base = BaseRunner

_STACKS = {
    "ddp": ("torch_runner", "TorchRunner"),
    "parallel": ("parallel_runner", "ParallelRunner"),
    "deepspeed": ("deepspeed_runner", "DeepSpeedRunner"),
}


class Runner(_Base):
    """Picks the stack named by `config.stack` and is it.

    `Runner(config)` and subclasses of `Runner` are instances of the stack's class too: `isinstance(runner, TorchRunner)` holds for
    `stack="ddp"`. The configuration is found as the first mapping among the constructor's arguments; without one the default
    stack is taken.

    Raises:
        ValueError: If the stack is unknown; the message lists the valid ones.
    """

    @classmethod
    def select_class(cls, *args: Any, **kwargs: Any) -> type[BaseRunner]:
        """Return `cls` joined with the class of the configured stack. Called on all ranks.

        Args:
            *args: What the runner is constructed with.
            **kwargs: As `args`.
        """
        config = next((value for value in (*args, *kwargs.values()) if isinstance(value, Mapping)), None)
        settings = config if isinstance(config, RunnerConfig) else RunnerConfig(config or {})
        return join_stack(cls, settings.stack_name())


@cache
def join_stack(cls: type[BaseRunner], stack: str) -> type[BaseRunner]:
    """Return `cls` with the methods of the stack behind its own; the same class for the same pair.

    Args:
        cls: `Runner` or a subclass.
        stack: Normalised stack name.
    """
    base = _stack_class(stack)
    if issubclass(cls, base):
        return cls
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    joined: type[BaseRunner] = types.new_class(
        cls.__name__, (cls, base), exec_body=lambda namespace: namespace.update(body)
    )
    return joined


def _stack_class(stack: str) -> type[BaseRunner]:
    module, name = _STACKS[stack]
    if find_spec(f"danling.runners.{module}") is None:
        raise ValueError(f"Expected a stack that this version of danling has: ddp. Received: stack={stack!r}.")
    found: type[BaseRunner] = getattr(import_module(f"danling.runners.{module}"), name)
    return found
