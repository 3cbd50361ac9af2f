"""Tensors: the local part of a sharded one, names of dtypes and parameters, and buckets for collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor)

# A checkpoint written under DDP, `torch.compile` or activation checkpointing must load into the bare model, so these never reach a file.
WRAPPER_SEGMENTS = frozenset(
    {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
)
_BUCKET_BYTES = 25 * 2**20
"""As many as DDP puts into one collective by default."""
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def shapes_of(data: object) -> str:
    """Return the dtypes, shapes and devices of the tensors in something, at any depth, and the types of the rest."""
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')} {tuple(data.shape)} on {data.device}"
    if isinstance(data, Mapping):
        return (
            "{"
            + ", ".join(f"{name!r}: {shapes_of(value)}" for name, value in list(data.items())[:8])
            + "}"
        )
    if isinstance(data, (list, tuple)):
        return "(" + ", ".join(map(shapes_of, data[:8])) + ")"
    dtype, shape = getattr(data, "dtype", None), getattr(data, "shape", None)
    if dtype is not None and isinstance(shape, tuple):
        return f"{type(data).__name__} {dtype} {shape}"
    return type(data).__name__


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; without its module there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return type(tensor) is not Tensor and module is not None and isinstance(tensor, module.DTensor)


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor of which this rank has a shard, or a term of a sum."""
    return is_sharded(tensor) and any(
        not placement.is_replicate()
        for placement in tensor.placements  # type: ignore[attr-defined]
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the shard of a DTensor, else the tensor."""
    local: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def is_plain_tensor(tensor: Tensor) -> bool:
    """Whether a tensor has the values of a plain one and nothing else, whatever its class."""
    kind: Any = type(tensor)
    # A parameter of another class than `nn.Parameter` is marked so.
    has_more = kind is not Tensor and any(name != "_is_param" for name in vars(tensor))
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ and not has_more


def has_strided_values(tensor: Tensor) -> bool:
    """Whether a tensor has a number for each place, in strides: it is not sparse, on the meta device, quantized or nested."""
    return tensor.layout == torch.strided and not (
        tensor.is_meta or tensor.is_quantized or tensor.is_nested
    )


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


def canonical_name(name: str, *, wrappers: frozenset[str] = WRAPPER_SEGMENTS - {"module"}) -> str:
    """Return `name` without wrapper segments.

    `module` is left alone by default: a user's own submodule may be called so. Unwrap DDP itself before asking for names.
    """
    segments = name.split(".")
    if wrappers.isdisjoint(segments):
        return name
    return ".".join([segment for segment in segments if segment not in wrappers])


def _nothing(_: Tensor) -> Hashable:
    return None


def bucketed(
    tensors: Iterable[T],
    key: Callable[[Tensor], Hashable] = _nothing,
    *,
    limit: int = _BUCKET_BYTES,
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


WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types of integers for which torch has hardly an operation: it stores them, and users cast them."""


def as_signed(target: Tensor) -> Tensor:
    """Return integer targets in a type that torch computes with, as a criterion casts them."""
    return target.long() if target.dtype in WIDE_UNSIGNED else target
