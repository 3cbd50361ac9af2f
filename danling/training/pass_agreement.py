"""How the ranks stay together in a pass: which of them has a batch left, and whether they read different data."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch.utils.data import IterableDataset

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.data.comparison import describe
from danling.distributed import Domain, agree

logger = logging.getLogger("danling")


@dataclass
class _FirstBatch:
    """The first batch of a pass, to compare others with."""

    epoch: int
    data: object
    repeats: int = 0
    """Later batches that are equal."""


class PassAgreement:
    """Keeps the ranks together in their passes: all end a pass at the same update, and a warning names ranks that read the same data.

    Args:
        domain: Ranks that make updates together.
        data_domain: Ranks that should read different data.
        blind: Whether some ranks read nothing themselves, such as those in the middle of a pipeline, and so know the end of a loader of
            the library only.
        collective_forward: Whether the forward of a micro-batch is a collective, so that the ranks must end a window together too.
    """

    def __init__(
        self,
        domain: Domain,
        data_domain: Domain,
        *,
        blind: bool = False,
        collective_forward: bool = False,
    ) -> None:
        self.domain = domain
        self.data_domain = data_domain
        self.blind = blind
        self.collective_forward = collective_forward
        self._compared: set[str] = set()
        self._first: dict[str, _FirstBatch] = {}

    def ends_alike(self, source: BatchSource) -> bool:
        """Whether every rank is known to see the end of a pass at the same batch; the same answer on all ranks."""
        return self.domain.size == 1 or (source.even and (source.length_is_known or not self.blind))

    def all_have(self, source: BatchSource, batch: Batch | None, taken: int = 0) -> bool:
        """Return whether every rank has a batch. A small collective, where the end cannot be known otherwise.

        Args:
            source: What the ranks read.
            batch: The next batch of this rank.
            taken: How many batches the open update has before it.
        """
        if self.ends_alike(source):
            return batch is not None
        # A rank that ran out would leave the others waiting in the gradient reduction, so the pass ends for all of them.
        words = ("exhausted",) if batch is None else ()
        ended = agree(self.domain, words)
        if ended and batch is not None:
            left = source.remaining_batches()
            self._warn_of_end(source, None if left is None else left - taken)
        return not ended

    def is_over(self, source: BatchSource) -> bool:
        """Return whether a pass is known to have no batch left, without reading on. The same answer on all ranks, which all call it."""
        left = source.remaining_batches()
        if self.ends_alike(source):
            return left == 0
        words = ("exhausted",) if left == 0 else ()
        ended = bool(agree(self.domain, words))
        if ended and left:
            self._warn_of_end(source, left)
        return ended

    def _warn_of_end(self, source: BatchSource, left: int | None) -> None:
        """Name what this rank has left where another one has no batch."""
        if left is None:
            rest = "the rest of its batches, whose number its loader does not know"
        else:
            rest = "its last batch" if left == 1 else f"its last {left} batches"
        logger.warning(
            "Another rank has no batch left in split %r: this pass ends early on rank %d, without %s.",
            source.split,
            self.domain.rank,
            rest,
        )

    def compare(self, source: BatchSource, batch: Batch) -> bool:
        """Warn, once a split, of ranks, and of workers of a stream, that should read different data and read the same.

        Returns:
            Whether no further batch of the pass need be compared.
        """
        split = source.split
        if split in self._compared:
            return True
        first = self._first.get(split)
        # The workers of a loader deliver in turn. The first batches of two passes are of one worker.
        if first is not None and first.epoch == source.epoch:
            if first.data == describe(batch.data):
                first.repeats += 1
                # The second batch of the first worker is equal too. Of a stream like that, such as one of zeros, nothing follows.
                is_over: bool = first.repeats >= source.loader.num_workers
                if is_over:
                    self._compared.add(split)
                return is_over
            if first.repeats and self.domain.rank == 0:
                logger.warning(
                    "Two workers read the same data in split %r, so that its samples come several times in a pass. Divide the stream by "
                    "torch.utils.data.get_worker_info(), or set num_workers to 1.",
                    split,
                )
            self._compared.add(split)
            return True
        if first is None:
            self._compare_ranks(source, batch)
        # Each worker has its own copy of a stream: the first batches of two workers are compared when the second one comes.
        streams = isinstance(getattr(source.loader, "dataset", None), IterableDataset)
        if (
            streams
            and getattr(source.loader, "num_workers", 0) > 1
            and batch.data is not PLACEHOLDER
        ):
            self._first[split] = _FirstBatch(source.epoch, describe(batch.data))
            return False
        self._compared.add(split)
        return True

    def _compare_ranks(self, source: BatchSource, batch: Batch) -> None:
        # A loader that ends alike is divided by the library.
        if self.ends_alike(source) or self.data_domain.size == 1:
            return
        described = None if batch.data is PLACEHOLDER else source.described(batch)
        seen = self.data_domain.gather_objects(described)
        is_same = seen[0] is not None and seen.count(seen[0]) == len(seen)
        if is_same and self.domain.rank == 0:
            logger.warning(
                "All ranks read the same data in split %r. A loader that you made, or over a stream, is not divided for you: divide "
                "it by self.data_domain.rank and self.data_domain.size, or put a map-style dataset into `self.datasets`.",
                source.split,
            )
