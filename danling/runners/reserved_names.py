"""Names of the library's on a runner, which a program may not use for something else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from danling.config.names import READ_ELSEWHERE

SETTABLE = frozenset(
    {
        "model",
        "ema",
        "criterion",
        "optimizer",
        "scheduler",
        "datasets",
        "dataloaders",
        "metrics",
        "meters",
        "config",
    }
    | {"carry", "shifts_labels"}
)
"""Components, which the library takes over as they were set."""

COMPONENTS = ("model", "ema", "criterion", "optimizer", "scheduler", "metrics")
"""Components of which a run has none until the user sets one."""

_REPLACEABLE = frozenset(
    {"state", "device", "workspace", "seed", "id", "timestamp", "code_id", "config_id"}
)
"""What a user may replace by another value of the same type."""

OFTEN_LEFT_OUT = frozenset({"forward_context", "on_pass_start", "to_device", "train_context"})
"""Hooks that the loops leave out, or do not look behind, where they are the library's own and do nothing."""

GUARDED = "_guarded"
"""Attribute of a runner whose `__init__` is under way: names are checked as they are set."""
_MISSING = object()


def begin(runner: object) -> dict[str, object]:
    """Give a runner its components, of which there are none yet; return what the user set before the library's `__init__`."""
    # On the runner, not on the class: a method that happens to be called so is no component, but a loss may be a method.
    for name in COMPONENTS:
        own = getattr(type(runner), name, None)
        if not isinstance(own, property) or own.fset is not None:
            is_method = name == "criterion" and callable(own)
            setattr(runner, name, getattr(runner, name) if is_method else None)
    return dict(vars(runner))


def guard(runner: Any, early: Mapping[str, object]) -> None:
    """Guard the names of the library from now on, and check those that the user set early."""
    attributes = vars(runner)
    set_here = {
        name for name, value in attributes.items() if early.get(name, _MISSING) is not value
    }
    # What `__init__` of the library has set is a name of the library, too.
    attributes["library_names"] = frozenset({*SETTABLE, *defined(runner.__class__), *set_here})
    for name in early.keys() - set_here:
        check_assignment(runner, name, attributes[name], present={})
    attributes[GUARDED] = True


def check_assignment(runner: Any, name: str, value: object, present: Mapping[str, object]) -> None:
    """Refuse an attribute of the user's under a name of the library's.

    Components, hooks and what has the type of the library's own value may be set; a method may be replaced by a function.

    Args:
        present: The attributes of the runner that the library has set.
    """
    if name in SETTABLE or name not in runner.library_names:
        return
    owner, original = defined(runner.__class__).get(name, ("BaseRunner", _MISSING))
    # Its setter checks the value.
    if isinstance(original, property) and original.fset is not None:
        return
    if original is _MISSING and name in present:
        original = present[name]
        is_allowed = value is original or (
            name in _REPLACEABLE and isinstance(value, type(original))
        )
    else:
        # `mode` is a value of the class that the library changes while it runs.
        is_allowed = (
            name != "mode" and _kind(original) != "property" and _may_replace(original, value)
        )
    if not is_allowed:
        raise _refused(f"self.{name} = {_shown(value)}", name, owner)


def check_method(runner: Any, name: str, value: object) -> None:
    """Refuse a value under the name of a method of the library's, which the loops call, on a constructed runner."""
    owner, original = defined(runner.__class__).get(name, ("", _MISSING))
    if original is not _MISSING and _kind(original) == "method":
        refused = _refused(f"self.{name} = {_shown(value)}", name, owner)
        raise AttributeError(f"{refused} To call the method, write self.{name}(...).")


def _shown(value: object) -> str:
    """Return a value for a message, in at most 40 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:37]}..."


def instead_of(name: str) -> str:
    """Return what is read here instead of an attribute of another trainer's, as a sentence."""
    answer = READ_ELSEWHERE.get(name)
    return f" Other trainers have it; use {answer} here." if answer else ""


def check_class(runner: Any) -> None:
    """Refuse methods and values in the classes of a user under names of the library's. Called when `__init__` has ended."""
    known = defined(runner.__class__)
    of_user = [
        each for each in type(runner).__mro__ if not _is_library(each) and each is not object
    ]
    for kind, name, value in ((each, *item) for each in of_user for item in vars(each).items()):
        is_free = name in SETTABLE or name not in runner.library_names or name == "_unjoined"
        if is_free or name.startswith("__"):
            continue
        owner, original = known.get(name, ("BaseRunner", _MISSING))
        if _kind(original) == "property" and _kind(value) == "method":
            raise AttributeError(
                f"Expected {name!r} to be a property, as that of the library ({owner}) is, which reads it. Received: a method of the class "
                f"{kind.__name__}. Put @property above it, or call it otherwise, such as 'my_{name.strip('_')}'."
            )
        if name in ("saved", "not_saved") and isinstance(value, str):
            raise TypeError(
                f"Expected {name} of the class {kind.__name__} to be a tuple of names. Received: {value!r}. Write {name} = ({value!r},)."
            )
        if name.startswith("_") or not _may_replace(original, value):
            raise _refused(f"{name} of the class {kind.__name__}", name, owner)


@functools.cache
def defined(runner_class: Any) -> dict[str, tuple[str, Any]]:
    """Return the names that the library's classes in a line define or declare: their owner, and what they are."""
    names: dict[str, tuple[str, Any]] = {}
    for kind in filter(_is_library, reversed(runner_class.__mro__)):
        for name in inspect.get_annotations(kind):
            names[name] = (kind.__name__, vars(kind).get(name, _MISSING))
        for name, value in vars(kind).items():
            if not name.startswith("__"):
                names[name] = (kind.__name__, value)
    return names


def _is_library(kind: type) -> bool:
    return kind.__module__.startswith("danling.runners.")


def _kind(value: object) -> str:
    if isinstance(value, (property, functools.cached_property)):
        return "property"
    if inspect.isroutine(value) or isinstance(
        value, (staticmethod, classmethod, functools.partial)
    ):
        return "method"
    return "value"


def _may_replace(original: object, value: object) -> bool:
    """Whether a value may be where the library has one: a property or a method for a method, a property for a property, plain data for
    plain data."""
    if original is _MISSING or original is None:
        return False
    if _kind(original) == "value":
        return isinstance(value, (type(original), property))
    return _kind(value) == "property" or _kind(original) == _kind(value) == "method"


def _refused(received: str, name: str, owner: str) -> AttributeError:
    return AttributeError(
        f"Expected another name for an attribute of a runner. Received: {received}, where {name!r} is a name "
        f"of the library's ({owner}). Call it otherwise, such as 'my_{name.strip('_')}'."
    )
