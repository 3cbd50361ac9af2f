"""What this rank holds of a tensor that may be sharded, and the dtypes that have names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; nobody has one who has not imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return type(tensor) is not Tensor and module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: the shard of a DTensor, else the tensor."""
    local: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def with_local_part(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor like `tensor` whose local part is `local`, on whatever device that is."""
    if not is_sharded(tensor):
        return local
    # from_local() would move it to the device of the mesh, which is where a copy in host memory must not go.
    kind: Any = type(tensor)
    rebuilt: Tensor = kind(local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    return rebuilt


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor; for a DTensor a collective of its mesh."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor divided as `like` is, without communication; anything else is returned as it is."""
    if is_sharded(tensor) or not is_sharded(like):
        return tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    placements: Any = like.placements  # type: ignore[attr-defined]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor[tuple(slice(start, start + length) for start, length in zip(offset, shape))]
    return with_local_part(like, local.to(local_part(like).device).contiguous())


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that torch prints as `torch.{name}`; the name is compared, not looked up as an attribute of torch."""
    if name not in _DTYPES:
        raise ValueError(f"Expected the name of a dtype, such as 'float32'. Received: {name!r}.")
    return _DTYPES[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have torch make floating tensors of a dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def floating_dtype(name: str, *, key: str) -> torch.dtype:
    """Return the floating dtype of a name, short or long."""
    dtype = getattr(torch, _SHORT.get(name.lower(), name.lower()), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"Expected {key} to be the name of a floating dtype, such as 'bf16', 'fp16' or 'float32'. Received: {key}={name!r}."
        )
    return dtype
