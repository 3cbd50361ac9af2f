"""Reads a loader that the library does not order, such as an iterable of the user's, and keeps a position in it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import Any

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from .dataset_state import is_stateful, set_epoch_of
from .loader import PLACEHOLDER, StreamLoader
from .randomness import Generators, derive_seed, mix_seed
from .sampled import divides_evenly, of_torchdata, order_of
from .sampler import Batch, Share
from .workers import end_with_process, kept_from_group_signals, shut_down_workers

logger = logging.getLogger("danling")

_END = object()
"""What is read in the place of a batch when the pass is over."""


class LiveLoader:
    """A loader of the user's, or a `StreamLoader`, with a position: its own state where it has one, else the number of batches.

    The loader's iterator is kept for as long as the pass lasts, since `iter` would begin it anew. A pass begins with new workers, and with
    the streams and the loader's generators seeded like the order of a sampler; each further batch is seeded by its number.

    A dataset that keeps its place cannot tell, from a state in which nothing is left, a pass of which only the end has not been seen
    from one that has not begun: it would begin another one. So where the length of a pass is not known, `state_dict` of a loader with a
    state reads one batch ahead, which is the next one to be trained on, and says of a pass that is over that it is.

    Attributes:
        kind: `"stateful"` or `"counted"`.
        consumed: Batches of this rank.
    """

    is_rank_local = True
    length_is_known = False

    def __init__(self, loader: Any, share: Share) -> None:
        self.loader = loader
        self.split, self.seed, self.rank, self.world_size = share
        self.kind = "stateful" if is_stateful(loader) else "counted"
        self.epoch = self.consumed = 0
        self._fetched = 0
        self._live: Iterator[Any] | None = None
        self._exhausted = False
        self._was_iterated = False
        self._seeds = type(loader) not in (list, tuple, range, StreamLoader)
        self._generators = Generators({})
        self.set_by_epoch: set[str] = set()
        """Attributes of the dataset that its `set_epoch` has changed."""
        self._pending: Mapping[str, Any] | None = None
        """The loader's state, from a checkpoint until the next iterator is made."""
        self._ahead: tuple[Any, dict[str, Any]] | None = None
        """What was read only to learn whether there is a batch, `_END` or an error; with the position before it, or after the end."""

    def is_even(self) -> bool:
        """Return whether every rank is known to get the same number of batches."""
        return self.world_size == 1 or divides_evenly(self.loader)

    def remaining_batches(self) -> int | None:
        """Return the batches from the position to the end of the pass, `None` if unknown."""
        if self._exhausted:
            return 0
        if isinstance(getattr(self.loader, "dataset", None), IterableDataset):
            return None
        try:
            return max(len(self.loader) - self.consumed, 0)
        except (TypeError, NotImplementedError):
            return None

    # Reading

    def micro_batches(self, *, read: bool) -> Iterator[Batch]:
        """Yield the batches from the position on; without reading, placeholders without end."""
        if not read:
            # Without end: only the ranks that read know when the pass is over.
            for number in count(self.consumed):
                yield Batch(PLACEHOLDER, None, None, place=(self.rank, number))
        if self._exhausted:
            return
        # An iterator that is further than the position has batches that were read for an update which was not made.
        if self._live is None or self._fetched != self.consumed:
            self._live = self._go_on() if self.kind == "stateful" else self._read_again()
        try:
            while True:
                ahead = self._ahead
                self._ahead = None
                data = self._fetch(self._live, self._fetched) if ahead is None else ahead[0]
                if isinstance(data, _Failed):
                    raise data.error
                if data is _END:
                    break
                self._fetched += 1
                yield Batch(data, None, None, place=(self.rank, self._fetched - 1))
        except Exception:
            # What raised would end quietly when asked again, as if the pass were over.
            self._live = None
            raise
        self._live, self._exhausted = None, True

    def _fetch(self, live: Iterator[object], number: int) -> object:
        """Return the next batch, `_END` after the last one."""
        if number and self._seeds:
            # The first batch goes on from how the pass was seeded, since many samplers draw their order only then.
            self._generators.seed(mix_seed(self._derived("read"), number))
        return next(live, _END)

    def _derived(self, purpose: str) -> int:
        # Another sampler may draw one permutation for all ranks and take a part of it, for which all must draw the same.
        own = type(order_of(self.loader)) in (RandomSampler, SequentialSampler, DistributedSampler)
        rank = (self.rank,) if own else ()
        return derive_seed(self.seed, purpose, self.split, self.epoch, *rank)

    def _iterate(self) -> Iterator[Any]:
        """Return the loader's iterator, at the beginning of the pass or at the state that the loader has loaded."""
        loader = self.loader
        dataset = getattr(loader, "dataset", None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers: tuple[Any, ...] = (
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        # Each object once: a loader may be its own sampler, and a batch sampler has the sampler of the loader.
        holders = {
            id(each): each
            for each in (loader, *samplers)
            if each is not dataset and callable(getattr(each, "set_epoch", None))
        }
        for holder in holders.values():
            holder.set_epoch(self.epoch)
        if callable(getattr(dataset, "set_epoch", None)):
            self.set_by_epoch |= set_epoch_of(dataset, self.epoch)
        if getattr(loader, "persistent_workers", False):
            # What they read would depend on what they read in earlier passes.
            shut_down_workers(loader)
        if self._seeds:
            self._generators = Generators({"loader": loader})
        self._generators.seed(self._derived("order"))
        with kept_from_group_signals(loader):
            iterator: Iterator[Any] = iter(loader)
        if getattr(loader, "num_workers", 0) and hasattr(iterator, "_shutdown_workers"):
            end_with_process(iterator)
        return iterator

    def _read_again(self) -> Iterator[object]:
        """Return an iterator at the position of a loader without a state: what was consumed is read again, and dropped."""
        if isinstance(self.loader, Iterator) and self._was_iterated:
            raise ValueError(
                f"Expected a loader of split {self.split!r} that can be iterated again for another pass. Received: "
                f"{type(self.loader).__name__}, which ends for good. Pass an iterable with __iter__, such as a DataLoader."
            )
        self._was_iterated = True
        iterator = self._iterate()
        for number in range(self.consumed):
            if self._fetch(iterator, number) is _END:
                raise ValueError(
                    f"Expected the loader of split {self.split!r} to have at least {self.consumed} batches, which were consumed when the "
                    f"run was saved. Received: {number} batches. Restore its dataset and batch size, or exclude 'dataloaders' from loading."
                )
        self._fetched = self.consumed
        return iterator

    def _go_on(self) -> Iterator[object]:
        """Return an iterator at the position of a loader with a state."""
        if self._live is not None:
            logger.warning(
                "%d batches of split %r were read and not used, and its loader cannot go back: they are skipped.",
                self._fetched - self.consumed,
                self.split,
            )
            self.consumed = self._fetched
            return self._live
        pending, self._pending = self._pending, None
        if pending is not None:
            self.loader.load_state_dict(pending)
        elif self.consumed:
            raise RuntimeError(
                f"Expected the loader of split {self.split!r} to continue after batch {self.consumed} of the pass. Received: "
                f"{type(self.loader).__name__}, which was closed or raised an error. Resume from a checkpoint, or rewind."
            )
        iterator = self._iterate()
        self._was_iterated = True
        self._fetched = self.consumed
        if self.consumed or pending is None:
            return iterator
        # The state may be that of a finished pass, after which the next one begins.
        first = self._fetch(iterator, 0)
        return self._iterate() if first is _END else chain([first], iterator)

    # Position

    def advance(self, batches: int) -> None:
        """Move the position by so many batches."""
        self.consumed += batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        if epoch == self.epoch and self.consumed:
            self._pending = None
        self.epoch = epoch
        self.consumed = self._fetched = 0
        self._live, self._exhausted, self._ahead = None, False, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        if self._ahead is None and self._live is not None and self._may_be_over():
            # Copied, since a dataset may go on changing the values of its state.
            before = copy.deepcopy(self._place())
            try:
                batch = self._fetch(self._live, self._fetched)
            except Exception as error:  # it concerns the reader of that batch, not the save
                batch = _Failed(error)
            self._ahead = batch, {**self._place(), "exhausted": True} if batch is _END else before
        return self._place() if self._ahead is None else self._ahead[1]

    def _may_be_over(self) -> bool:
        is_stream_from_its_beginning = (
            isinstance(self.loader, StreamLoader) and self.loader.is_read_again
        )
        if is_stream_from_its_beginning or self.kind == "counted":
            return False
        return self._fetched == self.consumed > 0 and self.remaining_batches() in (None, 0)

    def _place(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "exhausted": self._exhausted,
            "seed": self.seed,
            "world_size": self.world_size,
        }
        if self.kind == "counted":
            return state
        own = self._pending
        # A loader that was never iterated may have no state yet.
        if own is None and self._was_iterated:
            own = self.loader.state_dict()
        return {**state, "workers": getattr(self.loader, "num_workers", None), "loader": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: If workers keep parts of it, and there is another number of them.
        """
        loader = self.loader
        is_stream = isinstance(loader, StreamLoader)
        by_worker = is_stream or isinstance(loader, of_torchdata("StatefulDataLoader"))
        if by_worker and state["loader"] is not None and state["workers"] != loader.num_workers:
            raise ValueError(
                f"Expected num_workers={state['workers']} for the loader of split {self.split!r}, as when its state was saved: each "
                f"worker keeps a part of it. Received: num_workers={loader.num_workers}. Restore the number, or let the library build the "
                "loader from a map-style dataset."
            )
        self.set_epoch(state["epoch"])
        self.consumed, self._exhausted, self.seed = (
            state["consumed"],
            state["exhausted"],
            state["seed"],
        )
        self._pending = state.get("loader")
        if is_stream:
            loader.share = loader.share._replace(seed=int(state["seed"]))
        is_within = self.consumed > 0 and not self._exhausted
        if self.kind == "counted" and is_within and self.rank == 0:
            logger.warning(
                "The loader of split %r (%s) cannot be positioned: its first %d batches of epoch %d are read again and "
                "dropped. Let the library build it from a dataset, or give it state_dict and load_state_dict.",
                self.split,
                type(loader).__name__,
                self.consumed,
                self.epoch,
            )

    def close(self) -> None:
        """End the loader's worker processes."""
        self._live = None
        shut_down_workers(self.loader)


class _Failed:
    """The error of reading a batch ahead."""

    def __init__(self, error: Exception) -> None:
        self.error = error
