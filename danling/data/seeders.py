"""Objects that seed themselves when asked, as transforms of augmentation libraries do, and show no generator to seed instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_WORD = 2**32
"""Seeds are below it: the older generators of NumPy take no larger ones."""


class Seeder:
    """Seeds one object by `set_random_seed(seed)`, or by `set_random_state(seed=...)`.

    Args:
        path: Attributes, keys and indices that lead to it.
        target: The object.
        name: Its method.
    """

    def __init__(self, path: str, target: object, name: str) -> None:
        self.path = path
        self._target = target
        self._name = name

    def seed(self, seed: int) -> None:
        """Seed it.

        Args:
            seed: An integer of 63 bits, of which the method is given the lower 32.
        """
        method = getattr(self._target, self._name)
        if self._name == "set_random_seed":
            method(seed % _WORD)
        else:
            method(seed=seed % _WORD)


def asks_for_seed(value: object) -> bool:
    """Whether a class of this kind of object has one of the methods; nothing is called."""
    return any(callable(getattr(type(value), name, None)) for name in ("set_random_seed", "set_random_state"))


def seeder_of(path: str, value: Any) -> Seeder | None:
    """Return what seeds an object by its method, `None` where that cannot be done for each sample.

    What cannot be called is no transform: seeding such an object may change what it holds, such as the order of a dataset.

    Args:
        path: Attributes, keys and indices that lead to it.
        value: An object for which `asks_for_seed`.
    """
    kind = type(value)
    if not callable(value):
        return None
    if callable(getattr(kind, "set_random_seed", None)):
        return Seeder(path, value, "set_random_seed")
    return Seeder(path, value, "set_random_state") if _takes_seed(kind.set_random_state) else None


def _takes_seed(method: Callable[..., object]) -> bool:
    try:
        return "seed" in inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False
