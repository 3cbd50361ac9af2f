"""Names and what they build."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from danling.utils.suggest import did_you_mean

T = TypeVar("T", bound=Callable[..., Any])


class Registry:
    """Builders by name; case, `-` and `_` do not matter.

    Args:
        kind: What is built, for messages.
        known: Builders by name.
    """

    def __init__(self, kind: str, known: dict[str, Callable[..., Any]]) -> None:
        self.kind = kind
        self._builders = {_key(name): builder for name, builder in known.items()}
        self._names = {_key(name): name for name in known}

    def __contains__(self, name: str) -> bool:
        return _key(name) in self._builders

    def names(self) -> list[str]:
        """Return the known names, sorted."""
        return sorted(self._names.values())

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that makes a class or function known under `name`."""

        def add(builder: T) -> T:
            self._builders[_key(name)] = builder
            self._names[_key(name)] = name
            return builder

        return add

    def lookup(self, name: str) -> Callable[..., Any]:
        """Return the builder called `name`.

        Raises:
            ValueError: If there is none; the message lists the known names.
        """
        if not isinstance(name, str) or _key(name) not in self._builders:
            names = self.names()
            raise ValueError(
                f"Expected {self.kind} type to be one of {', '.join(names)}. Received: type={name!r}."
                f"{did_you_mean(str(name), names)}"
            )
        return self._builders[_key(name)]

    def accepts(self, name: str, option: str) -> bool:
        """Whether the builder called `name` takes `option`."""
        return option in inspect.signature(self.lookup(name)).parameters

    def check_options(self, name: str, options: Iterable[str]) -> None:
        """Raise a `ValueError` that lists the valid options when one of `options` is not among them."""
        parameters = inspect.signature(self.lookup(name)).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        valid = [option for option in parameters if option not in ("params", "optimizer", "self")]
        for option in options:
            if option not in valid:
                raise ValueError(
                    f"Expected options of {self.kind} {name!r} out of {', '.join(valid)}. Received: {option!r}."
                    f"{did_you_mean(option, valid)}"
                )


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
