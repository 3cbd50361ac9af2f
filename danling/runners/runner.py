"""The runner that takes the class of the configured stack."""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from danling.config import RunnerConfig
from danling.config.inputs import imposed

from .base_runner import BaseRunner
from .extensions import STACKS

if TYPE_CHECKING:
    # Every stack is a TorchRunner, so a type checker may know its methods; which one it is shows when it is constructed.
    from .torch_runner import TorchRunner as _Base
else:
    _Base = BaseRunner


class Runner(_Base):
    """Picks the stack named by `config.stack` and is it.

    `Runner(config)` and subclasses of `Runner` are instances of the stack's class too: `isinstance(runner, TorchRunner)` holds for
    `stack="ddp"`. The configuration is the one that arrives here: a subclass may take other arguments, and make its configuration itself
    before it calls `super().__init__(config)`.

    Raises:
        ValueError: If the stack is unknown; the message lists the valid ones.
    """

    _unjoined: ClassVar[Any] = None
    """The user's class, before it was joined with that of a stack."""

    def __init__(self, config: RunnerConfig | Mapping[str, object] | None = None) -> None:
        # Here the configuration is known for certain, and nothing of a stack has been set up yet.
        own_class = self._unjoined or type(self)
        self.__class__ = join_stack(own_class, _stack_of(config, self.config_class))  # type: ignore[assignment]
        super().__init__(config)


def _stack_of(config: RunnerConfig | Mapping[str, object] | None, kind: type[RunnerConfig]) -> str:
    stack = imposed().get("stack")
    if isinstance(stack, str):
        return RunnerConfig(stack=stack).stack_name()
    if isinstance(config, RunnerConfig):
        return config.stack_name()
    with warnings.catch_warnings():
        # The runner reads it once more, and says then what there is to say.
        warnings.simplefilter("ignore")
        return kind(config).stack_name()


@cache
def join_stack(cls: type[BaseRunner], stack: str) -> type[BaseRunner]:
    """Return `cls` with the methods of the stack behind its own; the same class for the same pair."""
    module, name = STACKS[stack]
    base: type[BaseRunner] = getattr(import_module(module), name)
    if issubclass(cls, base):
        return cls
    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")} | {
        "_unjoined": cls
    }
    joined: type[BaseRunner] = types.new_class(
        cls.__name__, (cls, base), exec_body=lambda namespace: namespace.update(body)
    )
    return joined
