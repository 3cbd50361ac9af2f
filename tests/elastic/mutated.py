"""The loop by hand, and a training, with a rule broken; each function is run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from danling.elastic.member import Membership
from danling.elastic.reconfigure import Group
from danling.elastic.shards import Shards

from . import plain_loop, training


def skips_leave() -> None:
    """A rank that does not close its sockets wakes none that waits for it."""
    Group.leave = lambda self: self.handle()  # type: ignore[method-assign]
    plain_loop.main()


def puts_in_early() -> None:
    """A rank counts the state of another one as its own before all of it has come."""

    def take(self: plain_loop.Loop, now: Membership, at: Callable[[str], object]) -> None:
        head, values = torch.tensor([self.update]), plain_loop.flat(self.model, self.optimizer)
        dist.broadcast(head, now.leader)
        if now.rank in now.behind:
            self.put_in(int(head), values)
        at("sending")
        dist.broadcast(values, now.leader)
        if now.rank in now.behind:
            self.put_in(int(head), values)

    plain_loop.Loop.take = take  # type: ignore[method-assign]
    plain_loop.main()


def drops_old_parts() -> None:
    """A rank drops the parts that it does not keep as soon as it has its new ones, before the others have theirs."""
    settle = Shards.settle

    def settle_alone(self: Shards) -> None:
        settle(self)
        self.keep_own()

    Shards.settle = settle_alone  # type: ignore[method-assign]
    training.elastic_rank()


def skips_vote() -> None:
    """A rank steps as soon as it has the sums itself."""
    succeeds = Shards._succeeds

    def succeeds_at_once(self: Shards, collective: Callable[[], object]) -> bool:
        return self._phase == "sums" or succeeds(self, collective)

    Shards._succeeds = succeeds_at_once  # type: ignore[method-assign]
    training.elastic_rank()
