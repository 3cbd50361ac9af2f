"""Where a batch comes from: the batches of a split and the position in them, for every kind of loader."""

from __future__ import annotations

import copy
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from .dataset_state import get_states, is_stateful, set_states, stateful_parts
from .generators import Generators
from .loader import DataLoader
from .randomness import derive_seed, mix_seed, seed_host_streams
from .sampled import SampledLoader, is_of_torchdata, keyed_twin
from .stream_loader import StreamLoader, stream_twin
from .windows import Batch, ReaderPlace, WindowLoader
from .workers import end_with_process, kept_from_group_signals, shut_down_workers

logger = logging.getLogger("danling")

_END = object()
_LISTS = (list, tuple, range)
"""Loaders that are batches made beforehand."""
_VALUES = 64
"""How many values of a tensor or a list are looked at."""


class _Placeholder:
    def __repr__(self) -> str:
        return "PLACEHOLDER"


PLACEHOLDER = _Placeholder()
"""The data of a batch that this rank does not read."""


def open_source(
    loader: Any,
    *,
    split: str,
    rank: int = 0,
    world_size: int = 1,
    seed: int | None = None,
    reads: bool = True,
    place: ReaderPlace | None = None,
) -> BatchSource:
    """Return the batches of a loader and the position in them. The loader decides how it is positioned:

    - a loader of the library: three integers, valid for any number of workers and ranks, and nothing is read twice;
    - a loader over a map-style dataset in the order of a sampler: what the sampler was like when it began the pass, and how far it got;
      one state per rank. A loader of torch or torchdata that a user made is read by one of this kind, in the order of its sampler;
    - a `WindowLoader`, such as that of a stream: samples consumed of the one order that all ranks share;
    - a loader with `state_dict` and `load_state_dict`: its own state; one per rank;
    - any other iterable: the number of batches consumed, which are read again and dropped when the run is resumed.

    Args:
        loader: An iterable of batches. It is never changed.
        split: Its split.
        rank: Which share of the split this rank reads: its coordinate in the data domain.
        world_size: How many shares there are.
        seed: Base seed of the run, from which the order of a user's loader is seeded at each pass; `None` leaves it to the streams.
        reads: Whether this rank reads batches; else it gets placeholders, and its position follows those that read. The end of a user's
            loader is known only to these, so that it never ends by itself here: the ranks have to agree on the end.
        place: What a `WindowLoader` is told; `None` leaves it as it is.

    Raises:
        ValueError: If the loader cannot be iterated, or its sampler takes another share.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ValueError(
            f"Expected the loader of split {split!r} to be iterable. Received: loader={loader!r} ({type(loader).__name__}). Pass a "
            "DataLoader, or put a dataset into `datasets`."
        )
    if reads:
        _check_share(loader, split, (rank, world_size))
    if place is not None and isinstance(loader, WindowLoader):
        loader.take_place(place)
    read: Any = None
    if seed is not None:
        read = keyed_twin(loader, split=split, seed=seed, rank=rank, world_size=world_size)
        if read is None:
            read = stream_twin(loader, split=split, seed=seed, rank=rank)
    if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True) and rank == 0:
        logger.warning(
            "The loader of split %r has in_order=False: batches come as workers finish, and a resumed run trains on them in another order. "
            "Leave it out.",
            split,
        )
    read = loader if read is None else read
    source = _kind_of(read)(read, split=split, rank=rank, world_size=world_size, seed=seed)
    source.loader, source.reads = loader, reads
    return source


def _kind_of(loader: Any) -> type[BatchSource]:
    if isinstance(loader, DataLoader):
        return PositionSource
    if isinstance(loader, SampledLoader):
        return SampledSource
    if isinstance(loader, WindowLoader):
        return WindowSource
    return StatefulSource if is_stateful(loader) else CountedSource


def _check_share(loader: object, split: str, share: tuple[int, int]) -> None:
    """Refuse a sampler that divides a user's loader over other ranks than those that read different data."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    for sampler in samplers:
        number, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if isinstance(number, int) and isinstance(rank, int) and number > 1 and (rank, number) != share:
            raise ValueError(
                f"Expected the sampler of split {split!r} to take share {share[0]} of {share[1]}, as this rank reads data. Received: "
                f"{type(sampler).__name__} with rank={rank}, num_replicas={number}. Pass rank=self.data_domain.rank and "
                "num_replicas=self.data_domain.size, or let the library build the loader from a dataset."
            )


class BatchSource(ABC):
    """Batches of a loader, and the position up to which they are consumed; see `open_source`.

    Prefetched batches do not count: the position moves when `commit` is called.

    Attributes:
        loader: What `open_source` was given.
        read: The loader, or the keyed one that replaces it.
        split: Name of the split.
        reads: Whether batches are read on this rank.
        check: Called before the position moves; raises where the data was changed within a pass.
        kind: How the loader is positioned: `"position"`, `"sampled"`, `"window"`, `"stateful"` or `"counted"`.
        is_rank_local: Whether each rank has its own state to save.
        foreseen: Whether a rank that reads nothing knows the batches, and the end of a pass, as those do that read.
        epoch: The pass that the position is in, from 0.
        consumed: How much of the pass is consumed: samples over all ranks for a loader of the library, else batches of this rank.
    """

    reads: bool = True
    kind: str
    is_rank_local: bool = True
    foreseen: bool = False
    epoch: int
    consumed: int

    def __init__(self, read: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        self.loader: Any = read
        self.read: Any = read
        self.split = split
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.check: Callable[[], None] = lambda: None

    # What kinds differ in

    @abstractmethod
    def _is_even(self) -> bool:
        """Whether every rank is known to get the same number of batches."""

    @property
    @abstractmethod
    def num_batches(self) -> int | None:
        """Batches of a whole pass on this rank, `None` if unknown."""

    @abstractmethod
    def remaining_batches(self) -> int | None:
        """Return the batches from the position to the end of the pass on this rank, `None` if unknown."""

    @abstractmethod
    def _read_batches(self) -> Iterator[Batch]:
        """Return the batches from the position on."""

    def _unread_batches(self) -> Iterator[Batch]:
        """Return placeholders of the batches from the position on; without end, where it is not known here."""
        return (Batch(PLACEHOLDER, None, None, place=(self.rank, number)) for number in count(self.consumed))

    @abstractmethod
    def _advance(self, batches: int) -> None:
        """Move the position by so many batches."""

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of pass `epoch`."""

    @abstractmethod
    def _state(self) -> Mapping[str, object]:
        """Return the position."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""

    # What all have

    @property
    def even(self) -> bool:
        """Whether every rank is known to get the same number of batches."""
        return (self.reads or self.foreseen) and self._is_even()

    def batches(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the pass, from the position on.

        Calls `set_epoch` of the loader, its samplers and its dataset first. Workers prefetch batches; without workers, a batch is fetched
        only when the caller asks for it.
        """
        return self._read_batches() if self.reads else self._unread_batches()

    def commit(self, batches: Sequence[Batch]) -> None:
        """Move the position: an update, committed or skipped, consumed these batches.

        Args:
            batches: The next batches that `batches()` gave, padding included. Only their number is read.
        """
        if self.reads:
            self.check()
        self._advance(len(batches))

    def finish_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self.set_epoch(self.epoch + 1)

    def rewind(self) -> None:
        """Go to the beginning of this pass."""
        self.set_epoch(self.epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position, as tensors and plain values. Take it between updates."""
        return {"kind": self.kind, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state: What `state_dict` returned; of this rank, where `is_rank_local`.

        Raises:
            ValueError: If it was saved by another kind of loader, or does not fit this one.
        """
        if not (self.reads or self.foreseen):  # the state of the loader itself is for the ranks that read it
            self.set_epoch(int(state["epoch"]))
            self._advance(int(state["consumed"]))
            return
        kind = state.get("kind")
        if kind != self.kind:
            raise ValueError(
                f"Expected a state of kind {self.kind!r} for split {self.split!r}, whose loader is a {type(self.loader).__name__}. "
                f"Received: kind={kind!r}, saved by another kind of loader. Restore the loader, or exclude 'dataloaders' from loading to "
                "start the epoch anew."
            )
        if self.is_rank_local and state.get("world_size", self.world_size) != self.world_size and state.get("consumed"):
            raise ValueError(
                f"Expected {state['world_size']} data ranks: the loader of split {self.split!r} ({type(self.loader).__name__}) counts what "
                f"each rank has read of this epoch, which cannot be divided anew. Received: {self.world_size}. Let the library build the "
                "loader from a dataset, or exclude 'dataloaders' from loading."
            )
        self._load({key: value for key, value in state.items() if key != "kind"})

    def close(self) -> None:
        """End the loader's worker processes."""
        shut_down_workers(self.read)

    @property
    def can_restart(self) -> bool:
        """Whether a pass can be begun, left and begun anew with the same batches.

        An iterator, and a loader over one, give each batch once; and a loader with its own state that torch does not know keeps its
        place.
        """
        if self.kind == "stateful" and not isinstance(self.loader, TorchDataLoader):
            return False
        return not any(hasattr(part, "__next__") for part in (self.loader, getattr(self.loader, "dataset", None)))

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Put the states that the dataset and the samplers of the loader declare by `state_dict` back on exit, also after an error."""
        parts = stateful_parts(getattr(self.loader, "dataset", None))
        order = self.loader.order if isinstance(self.loader, SampledLoader) else self.loader
        for name in ("sampler", "batch_sampler"):
            if is_stateful(held := getattr(order, name, None)):
                parts[name] = held
        states = get_states(parts)
        try:
            yield
        finally:
            set_states(parts, states)

    def described(self, batch: Batch) -> object:
        """Return a fingerprint by which ranks that read identical data are found: that of the dataset's values, else of the batch.

        Args:
            batch: The first one of a pass.
        """
        loader = self.loader
        reads_all = isinstance(loader, TorchDataLoader) and type(loader.sampler) in (RandomSampler, SequentialSampler)
        return _describe(loader.dataset if reads_all else batch.data)


def _describe(value: Any, depth: int = 4) -> object:
    """Return the plain values in something, and the first ones of its tensors and arrays, to compare it with another."""
    if isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "ravel")):
        return str(value.dtype), tuple(value.shape), value.ravel()[:_VALUES].tolist()
    if isinstance(value, (str, bytes, bool, int, float, range, type(None), os.PathLike)):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return [(repr(name), _describe(item, depth - 1)) for name, item in islice(value.items(), _VALUES)]
    if isinstance(value, (list, tuple)):
        return len(value), [_describe(item, depth - 1) for item in value[:_VALUES]]
    return type(value).__name__, _describe(getattr(value, "__dict__", {}), depth - 1)


class _KeptSource(BatchSource):
    """Position in a loader that keeps it itself."""

    @property
    def epoch(self) -> int:  # type: ignore[override]
        return int(self.read.epoch)

    @property
    def consumed(self) -> int:  # type: ignore[override]
        return int(self.read.consumed)

    def _advance(self, batches: int) -> None:
        self.read.advance(batches)

    def set_epoch(self, epoch: int) -> None:
        self.read.set_epoch(epoch)

    def _state(self) -> dict[str, object]:
        return dict(self.read.state_dict())

    def _load(self, state: dict[str, Any]) -> None:
        self.read.load_state_dict(state)


class PositionSource(_KeptSource):
    """Position in a loader of the library: `consumed` counts samples over all ranks, so that a position fits any world size."""

    kind = "position"
    foreseen = True
    read: DataLoader

    @property
    def is_rank_local(self) -> bool:  # type: ignore[override]
        """Whether each rank has a dataset whose own state is to be saved."""
        return bool(self.read.stateful)

    def _is_even(self) -> bool:
        return self.read.order.even

    @property
    def num_batches(self) -> int | None:
        return len(self.read)

    def remaining_batches(self) -> int | None:
        return self.read.remaining_batches

    def _read_batches(self) -> Iterator[Batch]:
        return self.read.micro_batches(self.read) if self.read.remaining_batches else iter(())

    def _unread_batches(self) -> Iterator[Batch]:
        return self.read.micro_batches(PLACEHOLDER for _ in range(self.read.remaining_batches))


class SampledSource(_KeptSource):
    """Position in a loader that reads in the order of a sampler: `consumed` counts batches of this rank."""

    kind = "sampled"
    read: SampledLoader

    def _is_even(self) -> bool:
        sampler = self.read.order.sampler
        return self.world_size == 1 or isinstance(getattr(sampler, "sampler", sampler), DistributedSampler)

    @property
    def num_batches(self) -> int | None:
        return None if self.read.order.length is None else len(self.read)

    def remaining_batches(self) -> int | None:
        return self.read.order.remaining()

    def _read_batches(self) -> Iterator[Batch]:
        if self.remaining_batches() != 0:
            for number, data in enumerate(self.read, self.consumed):
                yield Batch(data, None, None, place=(self.rank, number))


class WindowSource(_KeptSource):
    """Position in a `WindowLoader`: `consumed` counts samples over all ranks, so that a position fits any world size."""

    kind = "window"
    is_rank_local = False
    foreseen = True
    read: WindowLoader

    def _is_even(self) -> bool:
        return True

    @property
    def num_batches(self) -> int | None:
        return None

    def remaining_batches(self) -> int | None:
        return None

    def _read_batches(self) -> Iterator[Batch]:
        return self.read.micro_batches(read=True)

    def _unread_batches(self) -> Iterator[Batch]:
        return (batch._replace(data=PLACEHOLDER) for batch in self.read.micro_batches(read=False))

    def close(self) -> None:
        self.read.close()


class _LiveSource(BatchSource):
    """Position in a loader of the user's, or in a `StreamLoader`: `consumed` counts batches of this rank.

    The loader's iterator is kept for as long as the pass lasts, since `iter` would begin it anew. A pass begins with new workers, and with
    the streams and the loader's generators seeded like the order of a sampler; each further batch is seeded by its number.
    """

    def __init__(self, read: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(read, split=split, rank=rank, world_size=world_size, seed=seed)
        self.epoch = 0
        self.consumed = 0
        self._fetched = 0
        self._live: Iterator[Any] | None = None
        self._exhausted = False
        self._generators: Generators | None = None
        self._seeds = seed is not None and type(read) not in (*_LISTS, StreamLoader)

    def _is_even(self) -> bool:
        return self.world_size == 1 or isinstance(getattr(self.read, "sampler", None), DistributedSampler)

    @property
    def num_batches(self) -> int | None:
        if isinstance(getattr(self.read, "dataset", None), IterableDataset):
            return None
        try:
            return len(self.read)
        except (TypeError, NotImplementedError):
            return None

    def remaining_batches(self) -> int | None:
        if self._exhausted:
            return 0
        total = self.num_batches
        return None if total is None else max(total - self.consumed, 0)

    def _read_batches(self) -> Iterator[Batch]:
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
        if batch and self._seeds:
            # The first batch goes on from how the pass was seeded, since many samplers draw their order only then.
            self._seed(mix_seed(self._derived("read"), batch))
        return next(live, _END)

    def _derived(self, purpose: str) -> int:
        # Another sampler may draw one permutation for all ranks and take a part of it, for which all must draw the same.
        own = type(getattr(self.read, "sampler", None)) in (RandomSampler, SequentialSampler, DistributedSampler)
        return derive_seed(self.seed or 0, purpose, self.split, self.epoch, *((self.rank,) if own else ()))

    def _seed(self, seed: int) -> None:
        if self._generators is not None:
            self._generators.seed(seed)
        seed_host_streams(seed)

    @abstractmethod
    def _begin(self) -> Iterator[object]:
        """Return an iterator at the position, with `_fetched` equal to `consumed`."""

    def _iterate(self) -> Iterator[Any]:
        """Return the loader's iterator, at the beginning of the pass or at the state that the loader has loaded."""
        _call_set_epoch(self.read, self.epoch)
        if getattr(self.read, "persistent_workers", False):
            shut_down_workers(self.read)  # what they read would depend on what they read in earlier passes
        if self._seeds:
            self._generators = Generators({"loader": self.read})
        if self.seed is not None:
            self._seed(self._derived("order"))
        with kept_from_group_signals(self.read):
            iterator: Iterator[Any] = iter(self.read)
        if getattr(self.read, "num_workers", 0) and hasattr(iterator, "_shutdown_workers"):
            end_with_process(iterator)
        return iterator

    def _advance(self, batches: int) -> None:
        self.consumed += batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.consumed = self._fetched = 0
        self._live, self._exhausted = None, False

    def close(self) -> None:
        self._live = None
        super().close()

    def _state(self) -> dict[str, Any]:
        state = {"epoch": self.epoch, "consumed": self.consumed, "exhausted": self._exhausted}
        return {**state, "seed": self.seed, "world_size": self.world_size}

    def _load(self, state: dict[str, Any]) -> None:
        self.set_epoch(state["epoch"])
        self.consumed = state["consumed"]
        self._exhausted = state["exhausted"]
        self.seed = state["seed"]


class CountedSource(_LiveSource):
    """Position in a loader without a state: after a resume what was consumed is read again, and dropped."""

    kind = "counted"
    _started = False

    def _begin(self) -> Iterator[object]:
        if isinstance(self.read, Iterator) and self._started:
            raise ValueError(
                f"Expected a loader of split {self.split!r} that can be iterated again for another pass. Received: "
                f"{type(self.read).__name__}, which ends for good. Pass an iterable with __iter__, such as a DataLoader."
            )
        self._started = True
        iterator = self._iterate()
        for read in range(self.consumed):
            if self._fetch(iterator, read) is _END:
                raise ValueError(
                    f"Expected the loader of split {self.split!r} to have at least {self.consumed} batches, which were consumed when the "
                    f"run was saved. Received: {read} batches. Restore its dataset and batch size, or exclude 'dataloaders' from loading."
                )
        self._fetched = self.consumed
        return iterator

    def _load(self, state: dict[str, Any]) -> None:
        super()._load(state)
        if self.consumed and not self._exhausted and self.rank == 0:
            logger.warning(
                "The loader of split %r (%s) cannot be positioned: its first %d batches of epoch %d are read again and "
                "dropped. Let the library build it from a dataset, or give it state_dict and load_state_dict.",
                self.split,
                type(self.read).__name__,
                self.consumed,
                self.epoch,
            )


class _Ahead(NamedTuple):
    """A batch that was read only to learn whether there is one.

    Attributes:
        batch: The batch, `_END`, or the error of reading it.
        state: The position before it, or after the end.
    """

    batch: Any
    state: dict[str, Any]


class StatefulSource(_LiveSource):
    """Position in a loader with its own state: a `StreamLoader`, or one of the user's.

    A dataset that keeps its place cannot tell, from a state in which nothing is left, a pass of which only the end has not been seen
    from one that has not begun: it would begin another one. So where the length of a pass is not known, `state_dict` reads
    one batch ahead, which is the next one to be trained on, and says of a pass that is over that it is.
    """

    kind = "stateful"

    def __init__(self, read: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(read, split=split, rank=rank, world_size=world_size, seed=seed)
        self._touched = False
        self._pending: Mapping[str, Any] | None = None
        """The loader's state, from a checkpoint until the next iterator is made."""
        self._ahead: _Ahead | None = None

    def _fetch(self, live: Iterator[object], batch: int) -> object:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super()._fetch(live, batch)
        if isinstance(ahead.batch, Exception):
            raise ahead.batch
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
                f"Expected the loader of split {self.split!r} to go on after batch {self.consumed} of the pass. Received: "
                f"{type(self.read).__name__}, which was closed or raised an error. Resume from a checkpoint, or rewind."
            )
        pending, self._pending = self._pending, None
        if pending is not None:
            self.read.load_state_dict(pending)
        iterator = self._iterate()
        self._touched, self._fetched = True, self.consumed
        if self.consumed or pending is None:
            return iterator
        # The state may be that of a finished pass, after which the next one begins.
        first = self._fetch(iterator, 0)
        return self._iterate() if first is _END else chain([first], iterator)

    def set_epoch(self, epoch: int) -> None:
        if epoch == self.epoch and self.consumed:
            self._pending = None
        self._ahead = None
        super().set_epoch(epoch)

    def _state(self) -> dict[str, Any]:
        if self._ahead is None and self._live is not None and self._may_be_over():
            self._ahead = self._look_ahead(self._live)
        return self._place() if self._ahead is None else self._ahead.state

    def _may_be_over(self) -> bool:
        if isinstance(self.read, StreamLoader) and self.read.is_read_again:
            return False
        return self._fetched == self.consumed > 0 and self.remaining_batches() in (None, 0)

    def _look_ahead(self, live: Iterator[object]) -> _Ahead:
        before = copy.deepcopy(self._place())  # a dataset may go on changing the values of its state
        try:
            batch = super()._fetch(live, self._fetched)
        except Exception as error:  # it concerns the reader of that batch, not the save
            batch = error
        return _Ahead(batch, {**self._place(), "exhausted": True} if batch is _END else before)

    def _place(self) -> dict[str, Any]:
        own = self._pending
        if own is None and self._touched:
            own = self.read.state_dict()
        return {**super()._state(), "workers": getattr(self.read, "num_workers", None), "loader": own}

    def _load(self, state: dict[str, Any]) -> None:
        workers = getattr(self.read, "num_workers", None)
        by_worker = isinstance(self.read, StreamLoader) or is_of_torchdata(self.read)
        if by_worker and state["loader"] is not None and state["workers"] != workers:
            raise ValueError(
                f"Expected num_workers={state['workers']} for the loader of split {self.split!r}, as when its state was saved: each worker "
                f"keeps a part of it. Received: num_workers={workers}. Restore the number, or let the library build the loader from a "
                "map-style dataset."
            )
        super()._load(state)
        self._pending = state["loader"]
        if isinstance(self.read, StreamLoader):
            self.read.seed = int(state["seed"])


def _call_set_epoch(loader: object, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its dataset, wherever it exists."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    distinct = {id(holder): holder for holder in (*holders, getattr(loader, "dataset", None))}
    for holder in distinct.values():
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
