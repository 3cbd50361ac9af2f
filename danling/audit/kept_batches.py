"""Batches of an update, copied when they arrive, so that the update can be made again without reading them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from danling.utils.tensors import is_sharded

from .hashing import Hasher, key_of

_DEPTH = 8
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def copied(data: Any) -> Any:
    """Return a deep copy of a batch.

    Args:
        data: The batch as its loader gave it.

    Raises:
        ValueError: If it has something that cannot be copied.
    """
    try:
        return deepcopy(data, _copies_of([leaf for _, leaf in leaves(data) if isinstance(leaf, Tensor)]))
    except Exception as error:
        raise ValueError(
            f"Expected batches that can be copied with audit.replay_interval, so that an update can be made again. Received: a "
            f"{type(data).__name__}, of which copy.deepcopy says {type(error).__name__}: {error}. Return tensors and plain values from "
            "collate_fn, or leave the key out."
        ) from error


def _copies_of(tensors: Iterable[Tensor]) -> dict[int, Any]:
    """Return copies by the identity of tensors that `deepcopy` cannot copy, or would copy with the whole memory that they are a part of."""
    copies: dict[int, Any] = {}
    parts: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.grad_fn is not None or is_sharded(tensor):
            continue
        if tensor.is_nested or tensor.layout in (
            torch.sparse_csr,
            torch.sparse_csc,
            torch.sparse_bsr,
            torch.sparse_bsc,
        ):
            copies[id(tensor)] = tensor.clone()
        elif _is_plain(tensor):
            parts.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for together in parts.values():
        if not any(tensor.requires_grad for tensor in together):
            copies.update(_copies_of_parts(together))
    return copies


def _is_plain(tensor: Tensor) -> bool:
    computed = tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.numel() > 0 and not computed


def _copies_of_parts(tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return copies of tensors that lie in one memory, of the stretch of it that they take; empty where that is most of it."""
    storage = tensors[0].untyped_storage()
    ends = [_bytes_of(tensor) for tensor in tensors]
    start, end = min(first for first, _ in ends), max(last for _, last in ends)
    start -= start % 16
    if 2 * (end - start) > storage.nbytes():
        return {}
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[start:end].clone().untyped_storage()
    return {
        id(tensor): torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            memory, tensor.storage_offset() - start // tensor.element_size(), tensor.shape, tensor.stride()
        )
        for tensor in tensors
    }


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    size, offset = tensor.element_size(), tensor.storage_offset()
    length = 1 + sum((int(extent) - 1) * int(stride) for extent, stride in zip(tensor.shape, tensor.stride()))
    return int(offset) * size, (int(offset) + length) * size


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


def leaves(data: object) -> Iterator[tuple[str, object]]:
    """Yield the tensors, arrays and plain values of a batch, each with its path; what is met again is yielded as its number."""
    yield from _leaves(data, "", 0, {})


def _leaves(data: object, name: str, depth: int, met: dict[int, object]) -> Iterator[tuple[str, object]]:
    inner = _inner(data) if depth < _DEPTH else None
    if inner is None:
        yield name, data
    elif id(data) in met:
        yield name, list(met).index(id(data))
    else:
        met[id(data)] = data
        for key, value in inner:
            yield from _leaves(value, f"{name}.{key}" if name else str(key), depth + 1, met)


def _inner(data: object) -> list[tuple[object, object]] | None:
    if isinstance(data, (Tensor, *_PLAIN)):
        return None
    if hasattr(data, "__array__"):
        # The bytes of objects are where they lie.
        return list(enumerate(data.flat)) if _has_objects(data) else None  # type: ignore[attr-defined]
    if isinstance(data, Mapping):
        return [(_name_of(key, number), value) for number, (key, value) in enumerate(data.items())]
    if isinstance(data, (set, frozenset)):
        # A copy may have them in another order.
        return list(enumerate(sorted(data, key=lambda item: str(_name_of(item, 0)))))
    if isinstance(data, (list, tuple)):
        return list(enumerate(data))
    if is_dataclass(data) and not isinstance(data, type):
        return [(field.name, getattr(data, field.name, None)) for field in fields(data)]
    held = getattr(data, "__dict__", None)
    return list(held.items()) if isinstance(held, dict) and not callable(data) else None


def _has_objects(data: object) -> bool:
    return bool(getattr(getattr(data, "dtype", None), "hasobject", False)) and hasattr(data, "flat")


def _name_of(key: object, number: int) -> str:
    """Return a name that a copy has as well, unlike that of an object that is named by its place in memory."""
    plain = isinstance(key, _PLAIN) or (isinstance(key, tuple) and all(isinstance(part, _PLAIN) for part in key))
    return str(key) if plain else f"{type(key).__name__} {number}"


def _digest(leaf: object, hasher: Hasher) -> Tensor | int:
    if isinstance(leaf, Tensor):
        return hasher.digest(leaf) * key_of(leaf.dtype, tuple(leaf.shape) if not leaf.is_nested else ())
    if isinstance(leaf, _PLAIN):
        return key_of(repr(leaf))
    tobytes = getattr(leaf, "tobytes", None)
    # What is left is an object that says nothing of what is in it.
    if tobytes is None or _has_objects(leaf):
        return key_of(type(leaf).__name__)
    return key_of(getattr(leaf, "shape", ()), tobytes().hex())
