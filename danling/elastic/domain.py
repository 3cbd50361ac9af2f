"""The domain of all ranks of a run, of which any may end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from danling.distributed import Domain, MembershipChanged

from .member import is_lost_collective

T = TypeVar("T")


class ElasticDomain(Domain):
    """All ranks of the run, of which any may end: a collective that fails so raises `MembershipChanged`."""

    is_over = False
    """Whether the ranks must be formed again before they communicate."""

    def __init__(self, *, rank: int, size: int) -> None:
        self.group, self.device = None, torch.device("cpu")
        self.rank, self.size = rank, size
        self.may_change = False
        """Whether ranks can be left behind. Before and after the training, the error of a collective is that of this rank."""

    def check(self) -> None:
        """Raise `MembershipChanged` if the ranks must be formed again first."""
        if self.is_over:
            raise MembershipChanged

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return self.guarded(lambda: super(ElasticDomain, self).all_reduce(tensor, op))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self.guarded(lambda: super(ElasticDomain, self).broadcast(tensor, source))

    def gather_objects(self, value: T) -> list[T]:
        return self.guarded(lambda: super(ElasticDomain, self).gather_objects(value))

    def broadcast_object(self, value: T, source: int = 0) -> T:
        return self.guarded(lambda: super(ElasticDomain, self).broadcast_object(value, source))

    def barrier(self) -> None:
        self.guarded(super().barrier)

    def guarded(self, collective: Callable[[], T]) -> T:
        """Make a collective; raise `MembershipChanged` if a rank is gone, or if the ranks must be formed again first."""
        self.check()
        try:
            return collective()
        except RuntimeError as error:
            if not (self.may_change and is_lost_collective(error)):
                raise
        # Outside of `except`: an exception in the context of another one keeps its frames, and they keep the sockets open.
        self.is_over = True
        raise MembershipChanged
