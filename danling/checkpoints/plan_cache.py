"""What a sharded save has planned, kept for the next one: plans of many ranks are large, and from save to save they are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

Exchange = Callable[[int], list[int]]
"""Gathers a number of every rank on all of them."""

_CHANGED = -1


@dataclass
class PlanCache:
    """The plans of the last save of one rank, and on the coordinator what `.metadata` says of them.

    A save of which every rank plans the very same sends no plans and makes no global one. What ranks agree on is the number of the
    save that they remember, so that one that has forgotten, or remembers another save, leads to plans being made anew by all.

    torch's own cache compares neither dtypes nor the places in the nested state, is shared by every save of a process, and has the
    coordinator hold the plans of all ranks.
    """

    exchange: Exchange
    number: int = 0
    local: SavePlan | None = None
    final: SavePlan | None = None
    metadata: Metadata | None = None
    _planned: SavePlan | None = field(default=None, repr=False)
    _next: int = 1

    def is_known(self, plan: SavePlan) -> bool:
        """Whether every rank plans what it planned in the same save before. Call on all ranks of the save."""
        self._planned = plan
        numbers = self.exchange(self.number if self.final is not None and plan == self.local else _CHANGED)
        self._next = max(0, *numbers) + 1
        return numbers[0] != _CHANGED and len(set(numbers)) == 1

    def fail_to_plan(self) -> None:
        """Answer the other ranks, which ask whether the plan is known, on a rank that has failed to make one."""
        self.exchange(_CHANGED)

    def finish(self, plan: SavePlan) -> SavePlan:
        """Return what this rank is to write: the plan that comes from the coordinator, or the one before under the names of this save."""
        if plan.usable:
            self.local, self.final, self.number = self._planned, plan, self._next
            return plan
        assert self.final is not None
        return replace(self.final, storage_data=plan.storage_data)

    def forget(self) -> None:
        """Forget everything, since a save has failed and nobody knows how far the others came."""
        self.local = self.final = self.metadata = self._planned = None
