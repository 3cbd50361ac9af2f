"""One pass over the batches of a split: windows of micro-batches, the end of the pass on all ranks, and the loop of its updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import chain

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.distributed import Domain, agree

from .update import UNCOMMITTED, UpdateOutcome

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
        """Whether every rank is known to see the end of a pass at the same batch; the same answer on all ranks.

        Args:
            source: The batches of the split.
        """
        return self.domain.size == 1 or (source.even and (source.foreseen or not self.blind))

    def all_have(self, source: BatchSource, batch: Batch | None) -> bool:
        """Return whether every rank has a batch. A small collective, where the end cannot be known otherwise.

        Args:
            source: The batches of the split.
            batch: That of this rank, `None` at its end.
        """
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
        """Return whether a pass is known to have no batch left, without reading on. The same answer on all ranks, which all call it.

        Args:
            source: The batches of the split.
        """
        over = source.remaining_batches() == 0
        return over if self.ends_alike(source) else bool(agree(self.domain, ("exhausted",) if over else ()))

    def next_of_window(self, source: BatchSource, batches: Iterator[Batch]) -> Batch | None:
        """Return the next micro-batch of an open window, `None` where the pass ends.

        Args:
            source: The batches of the split.
            batches: What is left of them on this rank.
        """
        batch = next(batches, None)
        if not self.collective_forward or self.all_have(source, batch):
            return batch
        return None

    def compare(self, source: BatchSource, batch: Batch) -> None:
        """Say once a split where ranks that should read different data read the same.

        Args:
            source: The batches of the split.
            batch: The first one of this rank.
        """
        if source.split in self._compared:
            return
        self._compared.add(source.split)
        if self.ends_alike(source) or self.data_domain.size == 1:
            return
        seen = self.data_domain.gather_objects(source.described(batch) if batch.data is not PLACEHOLDER else None)
        if seen[0] is not None and seen.count(seen[0]) == len(seen) and self.domain.rank == 0:
            logger.warning(
                "All ranks read the same data in split %r. A loader of your own, or over a stream, is not divided for you: divide "
                "it by self.data_domain.rank and self.data_domain.size, or put a map-style dataset into `self.datasets`.",
                source.split,
            )


def updates_of_pass(
    source: BatchSource,
    *,
    agreement: PassAgreement,
    timed: Callable[[Iterator[Batch]], Iterator[Batch]],
    begin: Callable[[], None],
    state_replaced: Callable[[], bool] | None,
    is_over: Callable[[], bool],
    run: Callable[[Iterator[Batch], list[Batch]], bool],
    step: Callable[[], UpdateOutcome],
) -> Iterator[UpdateOutcome]:
    """Yield the outcome of every update of what is left of a pass: the one batch loop.

    The position of the source moves when an update is decided, even if it was skipped.

    Args:
        source: The batches of the split.
        agreement: Ends the pass on all ranks at once.
        timed: Measures the time spent waiting for batches.
        begin: Called at the first batch of a pass, before it is trained on; not for the rest of one.
        state_replaced: Called before each update; tells whether the state was replaced by that of another replica group, so that batches
            that were read before do not count; `None` without such groups.
        is_over: Tells whether the replaced state is past this pass.
        run: Runs the micro-batches of an update and fills a list with them; `False` where they are to be read again in smaller ones.
        step: Decides the update.

    Raises:
        ValueError: If there was no batch in the whole pass.
    """
    batches = timed(source.batches())
    ends_alike = agreement.ends_alike(source)
    found = source.consumed > 0
    compared = False
    begins = source.consumed == 0
    while True:
        batch = next(batches, None)
        if batch is None if ends_alike else not agreement.all_have(source, batch):
            break
        assert batch is not None
        found = True
        if not compared:
            agreement.compare(source, batch)
            compared = True
        if state_replaced is not None and state_replaced():
            if is_over():
                return
            batches = timed(source.batches())
            begins = source.consumed == 0
            continue
        if begins:
            begin()
            begins = False
        consumed: list[Batch] = []
        if not run(chain([batch], batches), consumed):
            batches = timed(source.batches())
            continue
        outcome = step()
        if outcome.reason == UNCOMMITTED:
            batches = chain(consumed, batches)
            continue
        source.commit(consumed)
        yield outcome
    if not found:
        raise ValueError(
            f"Expected at least one batch on every rank in split {source.split!r}. Received: an empty loader on some rank. Check the "
            "dataset, and `drop_last` against the batch size."
        )
