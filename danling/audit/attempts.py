"""Makes something several times until the attempts agree on all ranks, and says what differed where they do not."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from danling.utils.protocols import ReductionDomain

Record = Mapping[tuple[int, str], int]
"""Digests of what an attempt came to on this rank, under a stage and a name. What differs at the earliest stage differed first."""

GRADIENT = (1 << 20) - 1
"""Stage of gradients as a rank has computed them."""
REDUCED = 1 << 20
"""Stage of gradients that were reduced over ranks already: what differs there may have come from another rank."""


@dataclass(frozen=True)
class Attempts:
    """What several attempts at the same thing came to.

    Attributes:
        records: Of this rank, one for each attempt.
        classes: For each attempt what it is equal to on each rank: the number of the first attempt with the same record.
    """

    records: Sequence[Record]
    classes: Sequence[tuple[int, ...]]

    @property
    def agree(self) -> bool:
        """Whether they all came to the same on all ranks."""
        return len(set(self.classes)) == 1

    @property
    def usual(self) -> int | None:
        """The first of more than half of the attempts that came to the same on all ranks; `None` where there is no such half."""
        found, number = Counter(self.classes).most_common(1)[0]
        return self.classes.index(found) if 2 * number > len(self.classes) else None

    @property
    def last_is_usual(self) -> bool:
        """Whether the last attempt is one of more than half."""
        return self.usual is not None and self.classes[-1] == self.classes[self.usual]

    @property
    def odd(self) -> list[int]:
        """The numbers, from 1, of the attempts that differ from the usual one, or from the first where there is none."""
        reference = self.classes[self.usual or 0]
        return [number for number, found in enumerate(self.classes, 1) if found != reference]

    def first_differing(self) -> tuple[int, list[str]] | None:
        """Return the earliest stage at which attempts differ on this rank, and what differs there; `None` where nothing does."""
        reference = self.records[self.usual or 0]
        others = [record for record in self.records if record != reference]
        keys = sorted(
            {key for record in others for key in (*reference, *record) if reference.get(key) != record.get(key)}
        )
        return (keys[0][0], [name for stage, name in keys if stage == keys[0][0]]) if keys else None


def attempted(
    first: Record, again: Callable[[], Record], *, domain: ReductionDomain, device: torch.device, replays: int
) -> Attempts:
    """Make something again until it is known what it comes to. Called on all ranks.

    Where attempts differ it is made more often than asked, so that a fault that came once is told from what is never the same twice: until
    the last attempt is one of more than half, at most `2 * replays + 3` times in all.

    Args:
        first: What it came to the first time.
        again: Makes it again from the same beginning, and returns what it came to.
        domain: Ranks that make it together.
        device: Where the numbers of attempts are exchanged.
        replays: How often it is made again.
    """
    records: list[Record] = [first]
    classes: list[tuple[int, ...]] = [(0,) * domain.size]
    found = Attempts(records, classes)
    while len(records) <= replays or not (found.last_is_usual or len(records) == 2 * replays + 3):
        record = again()
        own = next((number for number, other in enumerate(records) if other == record), len(records))
        records.append(record)
        classes.append(shared(own, domain, device))
    return found


def shared(number: int, domain: ReductionDomain, device: torch.device) -> tuple[int, ...]:
    """Return a number of each rank. Called on all ranks.

    Args:
        number: That of this rank.
        domain: The ranks.
        device: Where they are exchanged.
    """
    if domain.size == 1:
        return (number,)
    numbers = torch.zeros(domain.size, dtype=torch.float64, device=device)
    numbers[domain.rank] = number
    return tuple(int(found) for found in domain.all_reduce(numbers).tolist())


def place_of(device: torch.device) -> str:
    """Return the name of a device and its machine, as an error shows them."""
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{name} of {socket.gethostname()}"


def mismatch(found: Attempts, what: str, *, domain: ReductionDomain, device: torch.device, summed: str = "") -> str:
    """Return what is to be said of attempts that differ. Called on all ranks.

    Args:
        found: The attempts.
        what: What was attempted, such as `update 12`.
        domain: The ranks.
        device: That of this rank.
        summed: Says over which ranks gradients were summed before they could be compared.
    """
    told: Sequence[tuple[tuple[int, list[str]] | None, str]]
    told = domain.gather_objects((found.first_differing(), place_of(device)))
    earliest = min(first[0] for first, _ in told if first is not None)
    guilty = [rank for rank, (first, _) in enumerate(told) if first is not None and first[0] == earliest]
    names = list(dict.fromkeys(name for rank in guilty for name in (told[rank][0] or (0, []))[1]))
    where = ", ".join(f"rank {rank} on {told[rank][1]}" for rank in guilty[:4]) + (", ..." if len(guilty) > 4 else "")
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    group = (
        f" It was summed over {summed} before it could be compared: one of them is wrong."
        if earliest == REDUCED
        else ""
    )
    return (
        f"Expected {what} to come to the same bits when it is made again. Received: {where}: {names[0]}{more} differ, in "
        f"{_numbered(found.odd)} of {len(found.records)} attempts.{group} {_meaning(found)}"
    )


def _numbered(odd: Sequence[int]) -> str:
    return f"number {odd[0]}" if len(odd) == 1 else f"numbers {', '.join(map(str, odd))}"


def _meaning(found: Attempts) -> str:
    if found.usual is not None and len(found.records) > 2:
        return (
            "The other attempts agree, so that a device or a link is to be suspected rather than the program: take the machine out and go "
            "on with auto_resume; audit.heal=true goes on with what most attempts agree on."
        )
    return (
        "The attempts do not agree with each other either: look for kernels that are not repeatable (`danling doctor --determinism`), and "
        "for what a step depends on besides its batch, such as the time or a file."
    )
