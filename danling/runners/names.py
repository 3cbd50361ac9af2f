"""Which names of a runner are the library's: a user's attribute or method under one of them is refused where it is set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SETTABLE = frozenset(
    {"model", "ema", "criterion", "optimizer", "scheduler", "datasets", "dataloaders", "metrics", "meters", "config"}
    | {"carry", "shifts_labels"}
)
"""Components, which the library takes over as they were set."""

COMPONENTS = ("model", "ema", "criterion", "optimizer", "scheduler", "metrics")
"""Components of which a run has none until the user sets one."""

_REPLACEABLE = frozenset({"state", "device", "workspace", "seed", "id", "timestamp", "code_id", "config_id"})
"""What a user may replace by another value of the same type."""

_CLASS_DATA = frozenset({"mode"})
"""What the library changes while it runs: it begins as an attribute of the class, and is no setting."""

GUARDED = "_guarded"
"""Attribute of a runner whose `__init__` is under way: names are checked as they are set."""
_MISSING = object()


def noting(init: Callable[..., None]) -> Callable[..., None]:
    """Return the `__init__` of one of the library's classes that also notes which names are the library's from then on."""

    @functools.wraps(init)
    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        held = vars(self)
        is_outermost = "library_names" not in held
        if is_outermost:
            held["library_names"] = frozenset()
            # On the runner, not on the class: a method that happens to be called so is no component, but a loss may be a method.
            for name in COMPONENTS:
                own = getattr(type(self), name, None)
                if not isinstance(own, property) or own.fset is not None:
                    is_loss = name == "criterion" and callable(own)
                    setattr(self, name, getattr(self, name) if is_loss else None)
        before = {name: value for name, value in held.items() if name != "library_names"} if is_outermost else {}
        init(self, *args, **kwargs)
        if is_outermost:
            added = {name for name, value in held.items() if before.get(name, _MISSING) is not value}
            held["library_names"] = frozenset({*SETTABLE, *defined(type(self)), *added})
            for name in before.keys() - added:
                check_assignment(self, name, held[name], {})
            held[GUARDED] = True

    return noted


def is_library(kind: type) -> bool:
    """Whether a class in the line of a runner is the library's, not a user's."""
    return kind.__module__.startswith("danling.runners.")


def check_assignment(runner: Any, name: str, value: object, present: Mapping[str, object] | None = None) -> None:
    """Refuse an attribute of the user's under a name of the library's.

    Components, hooks and what has the type of the library's own value may be set; a method may be replaced by a function.
    """
    if name in SETTABLE or name not in runner.library_names:
        return
    owner, original = defined(type(runner)).get(name, ("BaseRunner", _MISSING))
    if isinstance(original, property) and original.fset is not None:
        return
    present = vars(runner) if present is None else present
    if name in present and original is _MISSING:
        original = present[name]
        is_allowed = value is original or (name in _REPLACEABLE and isinstance(value, type(original)))
    else:
        is_allowed = name not in _CLASS_DATA and not _is_read(original) and _overrides(value, original)
    if not is_allowed:
        raise _refused(f"self.{name} = {_short(value)}", name, owner)


def check_class(runner: Any) -> None:
    """Refuse methods and values in the classes of a user under names of the library's. Called when `__init__` has ended."""
    known = defined(type(runner))
    for name, kind, value in _of_user(type(runner)):
        if name in SETTABLE or name not in runner.library_names:
            continue
        owner, original = known.get(name, ("BaseRunner", _MISSING))
        if _is_read(original) and not _is_read(value) and _is_called(value):
            raise AttributeError(
                f"Expected {name!r} to be a property, as that of the library ({owner}) is, which reads it. Received: a method of the class "
                f"{kind.__name__}. Put @property above it, or call it otherwise, such as 'my_{name.strip('_')}'."
            )
        if name.startswith("_") or not _overrides(value, original):
            raise _refused(f"{name} of the class {kind.__name__}", name, owner)


def defined(runner_class: type) -> dict[str, tuple[str, Any]]:
    """Return the names that the library's classes in a line define or declare: their owner, and what they are."""
    return _defined(runner_class)


@functools.cache
def _defined(runner_class: Any) -> dict[str, tuple[str, Any]]:
    names: dict[str, tuple[str, Any]] = {}
    for kind in filter(is_library, reversed(runner_class.__mro__)):
        for name in inspect.get_annotations(kind):
            names[name] = (kind.__name__, vars(kind).get(name, _MISSING))
        for name, value in vars(kind).items():
            if not name.startswith("__"):
                names[name] = (kind.__name__, value)
    return names


def _is_read(value: object) -> bool:
    return isinstance(value, (property, functools.cached_property))


def _is_called(value: object) -> bool:
    return inspect.isroutine(value) or isinstance(value, (staticmethod, classmethod, functools.partial))


def _overrides(value: object, original: object) -> bool:
    """Whether a value may be where the library has one: a property or a method for a method, a property for a property, plain data for
    plain data."""
    if original is _MISSING:
        return False
    if _is_read(original):
        return _is_read(value)
    if inspect.isroutine(original):
        return _is_read(value) or _is_called(value)
    return original is not None and isinstance(value, (type(original), property))


def _of_user(runner_class: type) -> Iterator[tuple[str, type, Any]]:
    for kind in runner_class.__mro__:
        if not is_library(kind) and kind is not object:
            yield from (
                (name, kind, value)
                for name, value in vars(kind).items()
                if not name.startswith("__") and name != "_unjoined"
            )


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refused(received: str, name: str, owner: str) -> AttributeError:
    return AttributeError(
        f"Expected names of your own on a runner. Received: {received}, where {name!r} is a name of the library's ({owner}). Call it "
        f"otherwise, such as 'my_{name.strip('_')}'."
    )
