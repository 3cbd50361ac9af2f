"""A copy of a state that later updates do not reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def snapshot(value: Any, memo: dict[Any, Tensor] | None = None) -> Any:
    """Return `value` with every tensor copied to the CPU; tensors that share memory share their copy.

    Args:
        value: Nested mappings, lists and tuples of tensors and plain values.
        memo: Copies made so far.
    """
    memo = {} if memo is None else memo
    if isinstance(value, Tensor):
        return _copy(value, memo)
    if isinstance(value, Mapping):
        return {key: snapshot(item, memo) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item, memo) for item in value)
    return value


def _copy(tensor: Tensor, memo: dict[Any, Tensor]) -> Tensor:
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() == 0 or key not in memo:
        # Through empty_like and copy_, so that a slice of a large storage does not take all of it along.
        copied = torch.empty_like(tensor.detach(), device="cpu")
        copied.copy_(tensor.detach())
        memo[key] = copied
    return memo[key]


def count_bytes(value: Any) -> int:
    """Return the bytes that the tensors of a state take."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(count_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(count_bytes(item) for item in value)
    return 0
