"""What the rooms ask of each other."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class ReductionDomain(Protocol):
    """Ranks that reduce together; every method is called on all of them, and at size 1 communicates nothing."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce in place and return the tensor."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all members in rank order."""

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the value of one member."""

    def barrier(self) -> None:
        """Wait for all members."""
