"""Collectives with gradients, for models that divide themselves over a mesh.

A value that is the same on all ranks of a group goes into work that each rank does a part of through `copy_to`, and what comes out
as partial sums becomes one value again through `sum_over`; each is the backward of the other. `gather_along` joins stretches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor_autograd


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> object:
        # A copy: the collective writes in place, and autograd may use this gradient elsewhere.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> object:
        return grads[0], None


def copy_to(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return a value that every rank of a group uses a part of; its gradient is the sum of theirs. Call on all of them."""
    copied: Tensor = value if group is None else _Copy.apply(value, group)  # type: ignore[no-untyped-call]
    return copied


def sum_over(value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of a value over the ranks of a group; the gradient goes to each as it is. Call on all of them."""
    total: Tensor = value if group is None else _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return total


def gather_along(value: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the values of all ranks of a group, joined along a dimension in rank order. Call on all of them.

    In the backward each rank gets the gradient of its own value, summed over the ranks that used it.
    """
    if group is None:
        return value
    gathered: Tensor = all_gather_tensor_autograd(value.contiguous(), dim, group)
    return gathered
