"""Imports the submodules of a package when one of their names is first used (PEP 562); which packages are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without an import. A module that the program has made under its name counts."""
    try:
        return find_spec(package) is not None
    except ValueError:  # it is imported, and has no spec
        return True


def lazily(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's `__getattr__` and `__dir__` that import a name's module when the name is first used.

    Submodules are found as attributes too, as if they had been imported.

    Importing torch takes seconds; what needs no torch, such as most of the command line, should not wait for it. Bind the
    two under `if not TYPE_CHECKING`, with plain imports for type checkers in the other branch: a `__getattr__` that type checkers
    see would let every misspelled name pass.
    """
    home = {name: module for module, names in homes.items() for name in names}

    def __getattr__(name: str) -> object:
        if name in home:
            # A home with a dot is a module of another package.
            place = home[name] if "." in home[name] else f"{package}.{home[name]}"
            value = getattr(import_module(place), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Found without this function the next time.
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        module = sys.modules[package]
        # Leave out names that the package imports for its own use, such as this function.
        own = (
            name
            for name, value in vars(module).items()
            if name.startswith("__") or isinstance(value, ModuleType)
        )
        return sorted({*own, *home, *getattr(module, "__all__", ())})

    return __getattr__, __dir__
