"""What is in mappings, lists and tuples at any depth, each with the keys that lead to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Path = tuple[object, ...]
"""The keys of a leaf, from the outside: those of mappings, and places in lists and tuples."""


def _as_it_is(value: object) -> object:
    return value


def leaves(
    value: object, *, opened: Callable[[Any], object] = _as_it_is, path: Path = ()
) -> Iterator[tuple[Path, object]]:
    """Yield everything that is no mapping, list or tuple, with the keys that lead to it.

    Args:
        value: Where to look.
        opened: Returns what to look at in the place of a value, such as a mapping with the fields of an object.
        path: The keys that lead to `value`.
    """
    value = opened(value)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, opened=opened, path=(*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, opened=opened, path=(*path, index))
    else:
        yield path, value


def tensors(
    value: object, *, opened: Callable[[Any], object] = _as_it_is
) -> Iterator[tuple[Path, Tensor]]:
    """Yield the tensors in a value, with the keys that lead to them; see `leaves`."""
    from torch import Tensor  # what is read from headers alone needs no torch

    for path, leaf in leaves(value, opened=opened):
        if isinstance(leaf, Tensor):
            yield path, leaf


def dotted(path: Path) -> str:
    """Return keys as one name, such as `model.0.weight`."""
    return ".".join(map(str, path))
