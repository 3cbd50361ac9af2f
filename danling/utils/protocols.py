"""What the rooms ask of each other."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from torch import Tensor

_T = TypeVar("_T")


class SteppedOptimizer(Protocol):
    """An optimizer as an update uses it: of torch, of an engine, or several in one."""

    param_groups: list[dict[str, Any]]

    def step(self) -> object:
        """Update the parameters."""

    def zero_grad(self) -> object:
        """Drop the gradients."""


class ReductionDomain(Protocol):
    """Ranks that reduce together; every method is called on all of them, and at size 1 communicates nothing."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce in place and return the tensor."""

    def gather_objects(self, value: _T) -> list[_T]:
        """Return the values of all members in rank order."""

    def broadcast_object(self, value: _T, source: int = 0) -> _T:
        """Return the value of one member."""

    def barrier(self) -> None:
        """Wait for all members."""
