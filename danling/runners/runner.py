"""The runner that takes the class of the configured stack."""

from __future__ import annotations

import inspect
import types
import warnings
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

from danling.config import RunnerConfig
from danling.config.files import FORMATS

from .base_runner import BaseRunner

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

_CONFIGS = (Mapping, Namespace, str, PathLike)


class Runner(_Base):
    """Picks the stack named by `config.stack` and is it.

    `Runner(config)` and subclasses of `Runner` are instances of the stack's class too: `isinstance(runner, TorchRunner)` holds for
    `stack="ddp"`. The configuration is found among the constructor's arguments: a `RunnerConfig`, what is passed as `config`, the
    first mapping, or the path of a file. A subclass that makes its configuration itself is told by what it passes to
    `super().__init__`.

    Raises:
        ValueError: If the stack is unknown; the message lists the valid ones.
    """

    _unjoined: ClassVar[Any] = None
    """The user's class, before it was joined with that of a stack."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        if self._unjoined is not None:
            # Here the configuration is known for certain, and nothing of a stack has been set up yet.
            self.__class__ = join_stack(self._unjoined, _stack_of(config, self.config_class))  # type: ignore[assignment]
        super().__init__(config)

    @classmethod
    def select_class(cls, *args: Any, **kwargs: Any) -> type[BaseRunner]:
        """Return `cls` joined with the class of the configured stack. Called on all ranks.

        Args:
            *args: What the runner is constructed with.
            **kwargs: As `args`.
        """
        try:
            stack = _stack_of(_find_config(cls, args, kwargs), cls.config_class)
        except (OSError, TypeError, ValueError):
            stack = "ddp"  # it may not be the configuration at all; if it is, `__init__` finds the same fault
        return join_stack(cls, stack)


def _find_config(cls: type[BaseRunner], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what looks most like the configuration among the arguments of a constructor, `None` without one."""
    values = [*args, *kwargs.values()]
    try:
        named = inspect.signature(cls.__init__).bind(None, *args, **kwargs).arguments.get("config")
    except TypeError:
        named = None  # the call itself will say what is wrong with the arguments
    found: list[Any] = [value for value in values if isinstance(value, RunnerConfig)]
    found += [named] if isinstance(named, _CONFIGS) else []
    found += [value for value in values if isinstance(value, Mapping)]
    found += [value for value in values if isinstance(value, Namespace) or _is_file(value)]
    return found[0] if found else None


def _is_file(value: Any) -> bool:
    return isinstance(value, (str, PathLike)) and str(value).lower().endswith(FORMATS)


def _stack_of(config: Any, kind: type[RunnerConfig]) -> str:
    if isinstance(config, RunnerConfig):
        return config.stack_name()
    with warnings.catch_warnings():
        # The runner reads it once more, and says then what there is to say.
        warnings.simplefilter("ignore")
        return kind(config).stack_name()


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
    body = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")} | {"_unjoined": cls}
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
