"""Where a pass over a loader is: what every kind of position offers, and the position in each kind of loader."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain, count, islice
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from .generators import Generators
from .loader import DataLoader
from .randomness import derive_seed, mix_seed, seed_host_streams
from .sampled import SampledLoader
from .stream_loader import StreamLoader
from .workers import end_with_process, kept_from_group_signals, shut_down_workers

logger = logging.getLogger("danling")

_END = object()
_LISTS = (list, tuple, range)
"""Loaders that are batches made beforehand."""


class Batch(NamedTuple):
    """One batch as a loader delivered it.

    Attributes:
        data: What the loader delivered.
        samples: Real samples on this rank, 0 for padding, `None` where only the data could tell.
        total: Real samples over all ranks, `None` where it is not known.
        closes: Whether it is the last one of its update, `None` where `accum_steps` says so.
        place: Where it is in the pass, which random numbers are keyed by: the position of its first sample in an order that all ranks
            share, else the rank and the number of the batch. Equal on ranks of one data coordinate, and after a resume.
        ordinal: With `gradient_sum: canonical`, its number in the update, over all ranks, and how many micro-batches the update has.
    """

    data: Any
    samples: int | None
    total: int | None
    closes: bool | None = None
    place: tuple[int, ...] = ()
    ordinal: tuple[int, int] | None = None


class Cursor(ABC):
    """The position in a loader. See `BatchSource`, which hands everything on to one of these."""

    kind: str
    is_rank_local: bool
    foreseen: bool = False
    """Whether a rank that reads nothing knows the batches, and the end of a pass, as those do that read."""

    def __init__(self, loader: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        self.loader = loader
        self.split = split
        self.rank = rank
        self.world_size = world_size
        self.seed = seed

    epoch: int
    consumed: int

    @property
    @abstractmethod
    def even(self) -> bool:
        """Whether every rank is known to get the same number of batches."""

    @abstractmethod
    def num_batches(self) -> int | None:
        """Return the batches of a whole pass on this rank, `None` if unknown."""

    @abstractmethod
    def remaining_batches(self) -> int | None:
        """Return the batches from the position on, `None` if unknown."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Return the batches from the position on."""

    def unread(self, data: object) -> Iterator[Batch]:
        """Yield batches from the position on for a rank that reads nothing, with `data` in the place of theirs; without end, where it is
        not known here.
        """
        return (Batch(data, None, None, place=(self.rank, number)) for number in count(self.consumed))

    @abstractmethod
    def commit(self, batches: int) -> None:
        """Move the position by so many batches."""

    def commit_state(self, state: Mapping[str, object]) -> None:  # noqa: B027
        """Hear of a position that is in a checkpoint on the disk. May be called on one rank, and from another thread."""

    def free(self) -> None:  # noqa: B027
        """Free what such a position has left to be freed; called in the thread that reads, where the run waits for nothing any more."""

    def metrics(self) -> dict[str, float]:
        """Return what is shown of the loader beside the metrics of an update. May be called on one rank."""
        return {}

    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are, for people who look at the run directory. May be called on one rank."""
        return {}

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""

    def finish_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self.set_epoch(self.epoch + 1)

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return the position."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position."""

    def check_world_size(self, state: Mapping[str, object]) -> None:
        """Refuse a position within a pass that was saved on another number of data ranks, each of which counts for itself."""
        if state.get("world_size", self.world_size) != self.world_size and state.get("consumed"):
            raise ValueError(
                f"Expected {state['world_size']} data ranks: the loader of split {self.split!r} "
                f"({type(self.loader).__name__}) counts what each rank has read of this epoch, which cannot be divided "
                f"anew. Received: {self.world_size}. Let the library build the loader from a dataset, or exclude "
                "'dataloaders' from loading."
            )

    def close(self) -> None:
        """End the loader's worker processes."""
        shut_down_workers(self.loader)


class KeepingLoader(Protocol):
    """A loader that keeps the position in it itself."""

    epoch: int
    """Pass of the position, from 0."""
    consumed: int
    """How far the pass is consumed."""

    def advance(self, batches: int) -> None:
        """Move the position by so many batches of each rank."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a saved position."""


class KeptCursor(Cursor):
    """Position in a loader that keeps it itself."""

    loader: KeepingLoader

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Pass of the position."""
        return self.loader.epoch

    @property
    def consumed(self) -> int:  # type: ignore[override]
        """How far the pass is consumed, as the loader counts."""
        return self.loader.consumed

    def commit(self, batches: int) -> None:
        """Move the position by so many batches of each rank."""
        self.loader.advance(batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the loader's position."""
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position."""
        self.loader.load_state_dict(dict(state))


class PositionCursor(KeptCursor):
    """Position in a loader of the library: `consumed` counts samples over all ranks, so that a position fits any world size."""

    kind = "position"
    foreseen = True
    loader: DataLoader

    @property
    def is_rank_local(self) -> bool:  # type: ignore[override]
        """Whether each rank has a dataset whose own state is to be saved."""
        return bool(self.loader.dataset_state)

    @property
    def even(self) -> bool:
        """Whether every rank gets the same number of batches."""
        return self.loader.even

    def num_batches(self) -> int | None:
        """Return the batches of a whole pass on this rank."""
        return len(self.loader)

    def remaining_batches(self) -> int | None:
        """Return the batches from the position on."""
        return self.loader.remaining_batches

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the position on."""
        if not self.loader.remaining_batches:
            return
        loader = self.loader
        for data, batch in zip(loader, self.unread(None)):
            yield batch._replace(data=data)

    def unread(self, data: object) -> Iterator[Batch]:
        """Yield what the batches from the position on are, with `data` in the place of theirs."""
        loader = self.loader
        counts = islice(loader.counts(), loader.remaining_batches)
        places, ordinals = loader.places(), loader.ordinals()
        for (samples, total), closes, place, ordinal in zip(counts, loader.closings(), places, ordinals):
            yield Batch(data, samples, total, closes, (place,), ordinal)


class SampledCursor(KeptCursor):
    """Position in a loader that reads in the order of a sampler: `consumed` counts batches of this rank."""

    kind = "sampled"
    is_rank_local = True
    loader: SampledLoader

    @property
    def even(self) -> bool:
        """Whether there is one rank only, or a sampler that gives each the same number."""
        sampler = self.loader.order.sampler
        divided = isinstance(getattr(sampler, "sampler", sampler), DistributedSampler)
        return self.world_size == 1 or divided

    def num_batches(self) -> int | None:
        """Return the batches of a whole pass on this rank, `None` where the sampler has no length."""
        return None if self.loader.order.length is None else len(self.loader)

    def remaining_batches(self) -> int | None:
        """Return the batches from the position on, `None` where the sampler has no length."""
        return self.loader.order.remaining()

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the position on."""
        if self.remaining_batches() == 0:
            return
        for number, data in enumerate(self.loader, self.consumed):
            yield Batch(data, None, None, place=(self.rank, number))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position."""
        self.check_world_size(state)
        super().load_state_dict(state)


class LiveCursor(Cursor):
    """Position in a loader of the user's: `consumed` counts batches of this rank.

    The loader's iterator is kept for as long as the pass lasts, since `iter` would begin it anew. A pass begins with new workers, and with
    the streams and the loader's generators seeded like the order of a sampler; each further batch is seeded by its number.
    """

    is_rank_local = True

    def __init__(self, loader: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(loader, split=split, rank=rank, world_size=world_size, seed=seed)
        self.epoch = 0
        self.consumed = 0
        self._fetched = 0
        self._live: Iterator[Any] | None = None
        self._exhausted = False
        self._generators: Generators | None = None

    @property
    def even(self) -> bool:
        """Whether there is one rank only, or a sampler that gives each the same number."""
        return self.world_size == 1 or isinstance(getattr(self.loader, "sampler", None), DistributedSampler)

    def num_batches(self) -> int | None:
        """Return `len(loader)`; `None` if it has none or can only guess."""
        if isinstance(getattr(self.loader, "dataset", None), IterableDataset):
            return None
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def remaining_batches(self) -> int | None:
        """Return the batches from the position on, `None` if unknown."""
        if self._exhausted:
            return 0
        total = self.num_batches()
        return None if total is None else max(total - self.consumed, 0)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the position on."""
        if self._exhausted:
            return
        if self._live is None or self._fetched != self.consumed:
            self._live = self._begin()
        try:
            while (data := self._fetch(self._live, self._fetched)) is not _END:
                self._fetched += 1
                yield Batch(data, None, None, place=(self.rank, self._fetched - 1))
        except Exception:
            # What raised would end quietly when asked again, as if the pass were over.
            self._live = None
            raise
        self._live, self._exhausted = None, True

    def _fetch(self, live: Iterator[object], batch: int) -> object:
        """Return the next batch, `_END` after the last one."""
        if batch and type(self.loader) not in (*_LISTS, StreamLoader):
            # The first batch goes on from how the pass was seeded, since many samplers draw their order only then.
            self._seed(mix_seed(self._derived("read"), batch))
        return next(live, _END)

    def _derived(self, purpose: str) -> int:
        # Another sampler may draw one permutation for all ranks and take a part of it, for which all must draw the same.
        own = type(getattr(self.loader, "sampler", None)) in (RandomSampler, SequentialSampler, DistributedSampler)
        return derive_seed(self.seed or 0, purpose, self.split, self.epoch, *((self.rank,) if own else ()))

    def _seed(self, seed: int) -> None:
        if self.seed is None:
            return
        if self._generators is not None:
            self._generators.seed(seed)
        seed_host_streams(seed)

    @abstractmethod
    def _begin(self) -> Iterator[object]:
        """Return an iterator at the position, with `_fetched` equal to `consumed`."""

    def _iterate(self) -> Iterator[Any]:
        """Return the loader's iterator, at the beginning of the pass or at the state that the loader has loaded."""
        _call_set_epoch(self.loader, self.epoch)
        if getattr(self.loader, "persistent_workers", False):
            shut_down_workers(self.loader)  # what they read would depend on what they read in earlier passes
        if self.seed is not None and type(self.loader) not in (*_LISTS, StreamLoader):
            self._generators = Generators({"loader": self.loader})
        self._seed(self._derived("order"))
        with kept_from_group_signals(self.loader):
            iterator: Iterator[Any] = iter(self.loader)
        if getattr(self.loader, "num_workers", 0) and hasattr(iterator, "_shutdown_workers"):
            end_with_process(iterator)
        return iterator

    def commit(self, batches: int) -> None:
        """Move the position by so many batches."""
        self.consumed += batches

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.epoch = epoch
        self.consumed = self._fetched = 0
        self._live, self._exhausted = None, False

    def close(self) -> None:
        """End the loader's worker processes and forget the pass under way."""
        self._live = None
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        state = {"epoch": self.epoch, "consumed": self.consumed, "exhausted": self._exhausted}
        return {**state, "seed": self.seed, "world_size": self.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        self.check_world_size(state)
        self.set_epoch(state["epoch"])
        self.consumed = state["consumed"]
        self._exhausted = state["exhausted"]
        self.seed = state["seed"]


class CountedCursor(LiveCursor):
    """Position in a loader without a state: after a resume what was consumed is read again, and dropped."""

    kind = "counted"
    _started = False

    def _begin(self) -> Iterator[object]:
        if isinstance(self.loader, Iterator) and self._started:
            raise ValueError(
                f"Expected a loader of split {self.split!r} that can be iterated again for another pass. Received: "
                f"{type(self.loader).__name__}, which ends for good. Pass an iterable with __iter__, such as a "
                "DataLoader."
            )
        self._started = True
        iterator = self._iterate()
        for read in range(self.consumed):
            if self._fetch(iterator, read) is _END:
                raise ValueError(
                    f"Expected the loader of split {self.split!r} to have at least {self.consumed} batches, which "
                    f"were consumed when the run was saved. Received: {read} batches. Restore its dataset and "
                    "batch size, or exclude 'dataloaders' from loading."
                )
        self._fetched = self.consumed
        return iterator

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; says once that what was consumed will be read again."""
        super().load_state_dict(state)
        if self.consumed and not self._exhausted and self.rank == 0:
            logger.warning(
                "The loader of split %r (%s) cannot be positioned: its first %d batches of epoch %d are read again and "
                "dropped. Let the library build it from a dataset, or give it state_dict and load_state_dict.",
                self.split,
                type(self.loader).__name__,
                self.consumed,
                self.epoch,
            )


class _Ahead(NamedTuple):
    """A batch that was read only to learn whether there is one.

    Attributes:
        batch: The batch, `_END`, or the `_Failed` reading of it.
        state: The position before it, or after the end.
    """

    batch: Any
    state: dict[str, Any]


class _Failed(NamedTuple):
    error: Exception


class StatefulCursor(LiveCursor):
    """Position in a loader with a state of its own: a `StreamLoader`, or one of the user's.

    A dataset that keeps its place cannot tell, from a state in which nothing is left, a pass of which only the end has not been seen
    from one that has not begun: it would begin another one. So where the length of a pass is not known, `state_dict` reads
    one batch ahead, which is the next one to be trained on, and says of a pass that is over that it is.
    """

    kind = "stateful"

    def __init__(self, loader: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(loader, split=split, rank=rank, world_size=world_size, seed=seed)
        self._touched = False
        self._pending: Mapping[str, Any] | None = None
        """The loader's state, from a checkpoint until the next iterator is made."""
        self._ahead: _Ahead | None = None

    def _fetch(self, live: Iterator[object], batch: int) -> object:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super()._fetch(live, batch)
        if isinstance(ahead.batch, _Failed):
            raise ahead.batch.error
        return ahead.batch

    def _begin(self) -> Iterator[object]:
        if self._live is not None:
            logger.warning(
                "%d batches of split %r were read and not used, and its loader cannot go back: they are skipped.",
                self._fetched - self.consumed,
                self.split,
            )
            self.consumed = self._fetched
            return self._live
        if self.consumed and self._pending is None:
            raise RuntimeError(
                f"Expected the loader of split {self.split!r} to go on after batch {self.consumed} of the pass. "
                f"Received: {type(self.loader).__name__}, which was closed or raised an error. Resume from a "
                "checkpoint, or rewind."
            )
        pending, self._pending = self._pending, None
        if pending is not None:
            self.loader.load_state_dict(pending)
        iterator = self._iterate()
        self._touched, self._fetched = True, self.consumed
        if self.consumed or pending is None:
            return iterator
        # The state may be that of a finished pass, after which the next one begins.
        first = self._fetch(iterator, 0)
        return self._iterate() if first is _END else chain([first], iterator)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass; a state that was loaded from the middle of the very same one is given up."""
        if epoch == self.epoch and self.consumed:
            self._pending = None
        self._ahead = None
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state; take it between updates, when nothing is fetched that is not consumed."""
        if self._ahead is None and self._live is not None and self._may_be_over():
            self._ahead = self._look_ahead(self._live)
        return self._place() if self._ahead is None else self._ahead.state

    def _may_be_over(self) -> bool:
        if isinstance(self.loader, StreamLoader) and self.loader.is_read_again:
            return False
        return self._fetched == self.consumed > 0 and self.remaining_batches() in (None, 0)

    def _look_ahead(self, live: Iterator[object]) -> _Ahead:
        before = copy.deepcopy(self._place())  # a dataset may go on changing what its state holds
        try:
            batch = super()._fetch(live, self._fetched)
        except Exception as error:  # it concerns the reader of that batch, not the save
            batch = _Failed(error)
        return _Ahead(batch, {**self._place(), "exhausted": True} if batch is _END else before)

    def _place(self) -> dict[str, Any]:
        own = self._pending
        if own is None and self._touched:
            own = self.loader.state_dict()
        return {**super().state_dict(), "workers": getattr(self.loader, "num_workers", None), "loader": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position."""
        workers = getattr(self.loader, "num_workers", None)
        if isinstance(self.loader, StatefulDataLoader) and state["loader"] is not None and state["workers"] != workers:
            raise ValueError(
                f"Expected num_workers={state['workers']} for the loader of split {self.split!r}, as when its state "
                f"was saved: a StatefulDataLoader keeps a part of it in each worker. Received: num_workers={workers}. "
                "Restore the number, or let the library build the loader from a map-style dataset."
            )
        super().load_state_dict(state)
        self._pending = state["loader"]
        if isinstance(self.loader, StreamLoader):
            self.loader.seed = int(state["seed"])


def _call_set_epoch(loader: object, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its dataset, wherever it exists."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    distinct = {id(holder): holder for holder in (*holders, getattr(loader, "dataset", None))}
    for holder in distinct.values():
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
