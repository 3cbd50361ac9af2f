"""The form of a planted fault: a switch that brings back what the library once computed wrongly without a word."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

VARIABLE = "EXPLORE_PLANTED"
"""The variable of the environment that names the fault to bring back; processes of a run inherit it."""
REACHED = "EXPLORE_REACHED"
"""The variable that names the file into which a run without a fault writes which switches it reaches."""

Replaced = tuple[object, str, Any]


@dataclass(frozen=True)
class Call:
    """A call of the right function, in the place of which a switch has another one.

    Attributes:
        arguments: Its positional arguments, `self` first.
        options: Those by keyword.
        result: What it returned.
        error: What it raised.
    """

    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    error: BaseException | None = None


class Switch(AbstractContextManager[None]):
    """Brings a fault back within a context, by other values in the place of attributes: `(owner, name, value)`."""

    def __init__(self, *replaced: Replaced) -> None:
        self.replaced = replaced
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for owner, name, value in self.replaced:
            # What `__init__` sets is no attribute of the class.
            self._stack.enter_context(
                patch.object(owner, name, value, create=not hasattr(owner, name))
            )

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def counts(call: Call) -> bool:
    """Have each call count: the switch makes every one another."""
    return True


def refuses(call: Call) -> bool:
    """Have a call count that raises: the switch takes an error away."""
    return call.error is not None


@dataclass(frozen=True)
class Planted:
    """A fault of the past.

    Attributes:
        name: Its name.
        point: Its number in the lists of past faults.
        breaks: What it breaks, in one sentence.
        switch: Brings it back within a context.
        acts: Whether the switch would make anything of a call another, which the right library makes: a program without such a call
            is the same with the fault and without.
        at: The function whose calls are meant, if it is not the first that the switch replaces.
    """

    name: str
    point: str
    breaks: str
    switch: Callable[[], Switch]
    acts: Callable[[Call], bool] = counts
    at: tuple[object, str] | None = None

    @property
    def place(self) -> tuple[Any, str]:
        """The function whose calls tell whether the switch is reached."""
        return self.at or self.switch().replaced[0][:2]


def faults() -> dict[str, Planted]:
    """Return all faults by name."""
    from explore import planted, planted_blind

    return {fault.name: fault for fault in (*planted.PLANTED, *planted_blind.PLANTED)}


def active() -> AbstractContextManager[None]:
    """Return a context with the fault that the environment names, or one that notes what is reached, if it asks for that."""
    if name := os.environ.get(VARIABLE):
        return faults()[name].switch()
    if file := os.environ.get(REACHED):
        return noting(faults().values(), Path(file))
    return nullcontext()


@contextmanager
def noting(planted: Iterable[Planted], file: Path) -> Iterator[None]:
    """Write the names of the faults whose switches a run reaches into a file, each once a process: a run may be killed at any time."""
    known: set[str] = set()

    def note(name: str) -> None:
        if name not in known:
            known.add(name)
            with file.open("a") as lines:
                lines.write(f"{name}\n")

    with ExitStack() as stack:
        for fault in planted:
            owner, name = fault.place
            stack.enter_context(
                patch.object(owner, name, _noted(getattr(owner, name), fault, note))
            )
        yield


def _noted(
    right: Callable[..., Any], fault: Planted, note: Callable[[str], None]
) -> Callable[..., Any]:
    @functools.wraps(right)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            result = right(*arguments, **options)
        except BaseException as error:
            if fault.acts(Call(arguments, options, error=error)):
                note(fault.name)
            raise
        if fault.acts(Call(arguments, options, result)):
            note(fault.name)
        return result

    return call
