"""Batches of an update, copied when they arrive, so that the update can be made again without reading them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import is_sharded

from .hashing import Hasher, key_of

_DEPTH = 8


def copied(data: Any) -> Any:
    """Return a deep copy of a batch.

    Args:
        data: The batch as its loader gave it.

    Raises:
        ValueError: If it has something that cannot be copied.
    """
    try:
        return deepcopy(data)
    except Exception as error:
        raise ValueError(
            f"Expected batches that can be copied with audit.replay_interval, so that an update can be made again. Received: a "
            f"{type(data).__name__}, of which copy.deepcopy says {type(error).__name__}: {error}. Return tensors and plain values from "
            "collate_fn, or leave the key out."
        ) from error


def digest_of(data: object, hasher: Hasher) -> list[tuple[str, Tensor | int]]:
    """Return the digests of all that a batch has, each under its path: 0-dim int64, or an integer for what is no tensor.

    Args:
        data: Tensors, arrays and plain values in mappings, sequences, data classes and other objects.
        hasher: Computes those of tensors.
    """
    return [(name, _digest(leaf, hasher)) for name, leaf in leaves(data)]


def memory_of(data: object) -> set[int]:
    """Return where the tensors of a batch lie in memory."""
    found = (leaf for _, leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
    return {leaf.data_ptr() for leaf in found if not is_sharded(leaf) and not leaf.is_nested and leaf.numel()}


def leaves(data: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the tensors, arrays and plain values of a batch, each with its path."""
    inner = _inner(data) if depth < _DEPTH else None
    if inner is None:
        yield name, data
        return
    for key, value in inner:
        yield from leaves(value, f"{name}.{key}" if name else str(key), depth + 1)


def _inner(data: object) -> list[tuple[object, object]] | None:
    if isinstance(data, (Tensor, bool, int, float, complex, str, bytes)) or data is None or hasattr(data, "__array__"):
        return None
    if isinstance(data, Mapping):
        return list(data.items())
    if isinstance(data, (list, tuple, set, frozenset)):
        return list(enumerate(data))
    if is_dataclass(data) and not isinstance(data, type):
        return [(field.name, getattr(data, field.name)) for field in fields(data)]
    held = getattr(data, "__dict__", None)
    return list(held.items()) if isinstance(held, dict) and not callable(data) else None


def _digest(leaf: object, hasher: Hasher) -> Tensor | int:
    if isinstance(leaf, Tensor):
        return hasher.digest(leaf) * key_of(leaf.dtype, tuple(leaf.shape))
    if isinstance(leaf, (bool, int, float, complex, str, bytes)) or leaf is None:
        return key_of(repr(leaf))
    tobytes = getattr(leaf, "tobytes", None)
    # What is left is an object that says nothing of what is in it.
    return key_of(type(leaf).__name__) if tobytes is None else key_of(getattr(leaf, "shape", ()), tobytes().hex())
