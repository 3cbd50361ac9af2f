"""Names and what they build."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from danling.utils.messages import did_you_mean

T = TypeVar("T", bound=Callable[..., Any])

# The library passes these itself.
_PASSED = ("params", "optimizer")
_OTHER_NAMES = {"learning_rate": "lr", "base_lr": "lr", "wd": "weight_decay", "adam_epsilon": "eps"}


class Registry:
    """Builders by name; case, `-` and `_` do not matter."""

    def __init__(self, kind: str, known: Mapping[str, Callable[..., Any]]) -> None:
        self.kind = kind
        self._builders = {_key(name): builder for name, builder in known.items()}
        self._names = {_key(name): name for name in known}

    def __contains__(self, name: str) -> bool:
        return _key(name) in self._builders

    def names(self) -> list[str]:
        """Return the known names, sorted."""
        return sorted(self._names.values())

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a class or function known under `name`; a name that is known is taken over.

        Examples:
            >>> @OPTIMIZERS.register("lion")  # doctest: +SKIP
            ... class Lion(torch.optim.Optimizer): ...
        """

        def add(builder: T) -> T:
            self._builders[_key(name)] = builder
            self._names[_key(name)] = name
            return builder

        return add

    def lookup(self, name: str | None) -> Callable[..., Any]:
        """Return the builder called `name`."""
        if not isinstance(name, str) or name not in self:
            names = self.names()
            raise ValueError(
                f"Expected {self.kind} type to be one of {', '.join(names)}. Received: type={name!r}."
                f"{did_you_mean(str(name), names)}"
            )
        return self._builders[_key(name)]

    def options(self, name: str | None) -> list[str] | None:
        """Return the options that the builder called `name` takes; `None` when it takes any."""
        parameters = _parameters(self.lookup(name))
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return None
        return [option for option in parameters if option not in _PASSED]

    def accepts(self, name: str | None, option: str) -> bool:
        """Whether the builder called `name` takes `option` by that very name."""
        return option in _parameters(self.lookup(name))

    def check_options(self, name: str | None, options: Iterable[str]) -> None:
        """Check the names of options before anything is built."""
        given = list(options)
        valid = self.options(name)
        for option in given:
            if valid is not None and option not in valid:
                raise ValueError(
                    f"Expected options of {self.kind} {name!r} out of {', '.join(valid)}. Received: {option!r}."
                    f"{did_you_mean(_OTHER_NAMES.get(option, option), valid)}"
                )
        missing = [option for option in _required(self.lookup(name)) if option not in given]
        if missing:
            raise ValueError(
                f"Expected {self.kind} {name!r} to be given {', '.join(missing)}, which it has no default for. "
                f"Received: {', '.join(given) or 'no options'}."
            )


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _parameters(builder: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(builder).parameters


def _required(builder: Callable[..., object]) -> list[str]:
    parameters = _parameters(builder)
    # A registered function may call its first argument what it likes.
    passed = [name for name in parameters if name in _PASSED] or list(parameters)[:1]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic and name not in passed
    ]
