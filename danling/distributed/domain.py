"""Sets of ranks that reduce together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Domain:
    """The ranks of one process group, or this process alone.

    Attributes:
        rank: Coordinate of this process among the members.
        size: Number of members. At 1 no method communicates.

    Args:
        group: A process group; `None` is the default group where one is initialised.
        device: Device on which collectives run; tensors elsewhere are copied there and back.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, device: torch.device | None = None) -> None:
        self.group = group
        distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if distributed else 0
        self.size: int = dist.get_world_size(group) if distributed else 1
        self.device = device or torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over the members and return it. Call on all members.

        Args:
            tensor: Any shape and a dtype that the backend reduces.
            op: `"sum"`, `"max"`, `"min"` or `"product"`.
        """
        if self.size == 1:
            return tensor
        if tensor.device.type == self.device.type or _reduces_on(self.group, tensor.device):
            dist.all_reduce(tensor, _OPERATIONS[op], group=self.group)
            return tensor
        moved = tensor.to(self.device)
        dist.all_reduce(moved, _OPERATIONS[op], group=self.group)
        return tensor.copy_(moved)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `tensor` from the member `source` into `tensor` on all members. Call on all members."""
        if self.size > 1:
            dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all members in rank order, on all of them. Call on all members."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the value of the member `source` on all members. Call on all members."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=source, group=self.group)
        return box[0]

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on the first member; return its value, or raise its error, on all of them. Call on all members."""
        value: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                value = action()
            except Exception as raised:
                error = raised
        value, told = self.broadcast_object((value, error))
        if told is not None:
            raise error or told
        result: T = value
        return result

    def barrier(self) -> None:
        """Wait until all members have come here. Call on all members."""
        if self.size > 1:
            dist.barrier(group=self.group)


def _reduces_on(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    backend = dist.get_backend_config(group)
    return f"{device.type}:" in backend


class LocalDomain(Domain):
    """This process alone: nothing is communicated, whatever groups exist."""

    def __init__(self) -> None:
        self.group = None
        self.rank = 0
        self.size = 1
        self.device = torch.device("cpu")


def world_of(size: int, device: torch.device) -> Domain:
    """Return the domain of all processes of a run. Call on all ranks.

    Args:
        size: Number of processes that were launched together.
        device: Device on which collectives run.

    Raises:
        ValueError: If there are several, and no process group joins them.
    """
    if size > 1 and not dist.is_initialized():
        raise ValueError(
            f"Expected `init_distributed` to join a process group of {size} processes. Received: none. Call super().init_distributed() "
            "in it, or torch.distributed.init_process_group."
        )
    return Domain(device=device) if size > 1 else LocalDomain()
