"""Which methods and properties of a class are the user's own."""

from __future__ import annotations

import inspect
from functools import cached_property


def is_overridden(owner: object, name: str) -> bool:
    """Whether a method or property of an object's class is the user's own, not the library's."""
    # Not `getattr`, which would call a property.
    found = inspect.getattr_static(type(owner), name)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    elif isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    return not getattr(found, "__module__", "").startswith("danling.")
