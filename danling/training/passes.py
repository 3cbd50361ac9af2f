"""The end of a pass over a split, on all ranks at the same update."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.distributed import Domain, agree

logger = logging.getLogger("danling")


class PassAgreement:
    """Keeps the ranks together in their passes: all end a pass at the same update, and are told where they read the same data.

    Args:
        domain: Ranks that make updates together.
        data_domain: Ranks that should read different data.
        blind: Whether some ranks read nothing themselves, such as those in the middle of a pipeline, and so know the end of a loader of
            the library only.
        collective_forward: Whether the forward of a micro-batch is a collective, so that the ranks must end a window together too.
    """

    def __init__(
        self, domain: Domain, data_domain: Domain, *, blind: bool = False, collective_forward: bool = False
    ) -> None:
        self.domain = domain
        self.data_domain = data_domain
        self.blind = blind
        self.collective_forward = collective_forward
        self._compared: set[str] = set()

    def ends_alike(self, source: BatchSource) -> bool:
        """Whether every rank is known to see the end of a pass at the same batch; the same answer on all ranks."""
        return self.domain.size == 1 or (source.even and (source.foreseen or not self.blind))

    def all_have(self, source: BatchSource, batch: Batch | None) -> bool:
        """Return whether every rank has a batch. A small collective, where the end cannot be known otherwise."""
        if self.ends_alike(source):
            return batch is not None
        # A rank that ran out would leave the others waiting in the gradient reduction, so the pass ends for all of them.
        ended = agree(self.domain, () if batch is not None else ("exhausted",))
        if ended and batch is not None:
            logger.warning(
                "Another rank has no batch left in split %r: this pass ends early on rank %d.",
                source.split,
                self.domain.rank,
            )
        return not ended

    def is_over(self, source: BatchSource) -> bool:
        """Return whether a pass is known to have no batch left, without reading on. The same answer on all ranks, which all call it."""
        over = source.remaining_batches() == 0
        return over if self.ends_alike(source) else bool(agree(self.domain, ("exhausted",) if over else ()))

    def next_of_window(self, source: BatchSource, batches: Iterator[Batch]) -> Batch | None:
        """Return the next micro-batch of an open window, `None` where the pass ends."""
        batch = next(batches, None)
        if not self.collective_forward or self.all_have(source, batch):
            return batch
        return None

    def compare(self, source: BatchSource, batch: Batch) -> None:
        """Say once a split where ranks that should read different data read the same."""
        if source.split in self._compared:
            return
        self._compared.add(source.split)
        if self.ends_alike(source) or self.data_domain.size == 1:
            return
        seen = self.data_domain.gather_objects(source.described(batch) if batch.data is not PLACEHOLDER else None)
        if seen[0] is not None and seen.count(seen[0]) == len(seen) and self.domain.rank == 0:
            logger.warning(
                "All ranks read the same data in split %r. A loader that you made, or over a stream, is not divided for you: divide "
                "it by self.data_domain.rank and self.data_domain.size, or put a map-style dataset into `self.datasets`.",
                source.split,
            )
