"""Many tensors in few collectives: lists of a bounded size, made flat and taken apart again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .tensors import local_part

_BYTES = 25 * 2**20
"""What is made flat is copied, so that it must not be everything at once."""

T = TypeVar("T", bound=Tensor)


def _nothing(_: Tensor) -> Hashable:
    return None


def bucketed(
    tensors: Iterable[T], key: Callable[[Tensor], Hashable] = _nothing, *, limit: int = _BYTES
) -> list[list[T]]:
    """Return tensors in lists of one dtype, device and key, in the same order on every rank that has the same tensors."""
    buckets: list[list[T]] = []
    current: dict[Hashable, list[T]] = {}
    sizes: dict[Hashable, int] = {}
    for tensor in tensors:
        kind = (key(tensor), tensor.dtype, tensor.device)
        size = local_part(tensor).numel() * tensor.element_size()
        if kind not in current or sizes[kind] + size > limit:
            current[kind], sizes[kind] = [], 0
            buckets.append(current[kind])
        current[kind].append(tensor)
        sizes[kind] += size
    return buckets


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype and device, one after another: a copy of one dimension."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def scatter(flat: Tensor, targets: Sequence[Tensor]) -> None:
    """Write the elements of a flat tensor into others, one after another."""
    start = 0
    for target in targets:
        target.copy_(flat[start : start + target.numel()].view(target.shape))
        start += target.numel()
