"""The loop by hand with a rule broken; each function is run in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed as dist

from danling.elastic.member import Membership
from danling.elastic.reconfigure import Group

from . import plain_loop


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
