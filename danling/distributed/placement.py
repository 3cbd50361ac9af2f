"""What a rank knows of its place in a run: with whom it reduces, and what of its work counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .domain import Domain


def _default_group() -> Sequence[Any]:
    """Return the default process group alone."""
    return (None,)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one rank in a run.

    Attributes:
        data: Ranks that read different samples.
        optimizer: Ranks that decide an update together.
        metrics: Ranks whose losses and metrics add up to those of all data.
        groups: Returns the process groups that training communicates over; `None` is the default one.
        reads_data: Whether this rank reads batches.
        counts_loss: Whether the loss of this rank counts: of the ranks that compute the same one, the first does.
        counts_samples: Whether the samples of this rank count: of the ranks that see the same ones, the first does.
        forward_place: Joins the keys of random numbers in a forward, if ranks that see the same samples need different noise.
        update_place: Joins the keys of random numbers in an optimizer step, where no rank with another one holds a copy of a parameter.
        replica_group: Index of the replica group of this process, and how many there are.
    """

    data: Domain
    optimizer: Domain
    metrics: Domain
    groups: Callable[[], Sequence[Any]] = _default_group
    reads_data: bool = True
    counts_loss: bool = True
    counts_samples: bool = True
    forward_place: tuple[int, ...] = ()
    update_place: tuple[int, ...] = ()
    replica_group: tuple[int, int] = (0, 1)

    @classmethod
    def alike(cls, world: Domain) -> Placement:
        """Return the place of a rank if every rank holds the whole model and reads its own samples."""
        return cls(data=world, optimizer=world, metrics=world)

    def in_group(self, index: int, number: int) -> Placement:
        """Return the same place in one of several replica groups.

        Args:
            index: Of the group.
            number: How many there are.
        """
        return replace(self, replica_group=(index, number))

    @property
    def data_replicas(self) -> int:
        """Number of ranks that read different samples to train on, over all replica groups."""
        return self.data.size * self.replica_group[1]

    def share(self, *, trained: bool) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are.

        Training data is divided over all replica groups; each group evaluates all of a split, so that no death makes a metric wrong.

        Args:
            trained: Whether the split is trained on.
        """
        group, groups = self.replica_group if trained else (0, 1)
        return group * self.data.size + self.data.rank, groups * self.data.size
