"""What a rank knows of its place in a run: with whom it reduces, and what of its work counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .domain import Domain


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one rank in a run.

    Attributes:
        data: Ranks that read different samples.
        optimizer: Ranks that decide an update together.
        metrics: Ranks whose losses and metrics add up to those of all data.
        reads_data: Whether this rank reads batches.
        counts_loss: Whether the loss of this rank counts: of the ranks that compute the same one, the first does.
        counts_samples: Whether the samples of this rank count: of the ranks that see the same ones, the first does.
        rng_stream: Index and number of the random streams of a forward; ranks with one index draw the same numbers.
        rng_layout: Degrees that divide one data replica, by axis; a forward draws the same numbers only where they are the same.
    """

    data: Domain
    optimizer: Domain
    metrics: Domain
    reads_data: bool = True
    counts_loss: bool = True
    counts_samples: bool = True
    rng_stream: tuple[int, int] = (0, 1)
    rng_layout: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def alike(cls, world: Domain) -> Placement:
        """Return the place of a rank where every rank holds the whole model and reads samples of its own."""
        return cls(data=world, optimizer=world, metrics=world, rng_stream=(world.rank, world.size))
