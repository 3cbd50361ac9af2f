"""Reads iterable datasets with all randomness keyed by (seed, split, pass, worker, batch)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data._utils.collate import default_collate, default_convert

from .collation import collate
from .dataset_state import check_savable, from_plain, is_stateful, to_plain
from .generators import Generators
from .keyed import as_is, draws_nothing
from .randomness import derive_seed, mix_seed, seed_host_streams
from .sampled import is_plain_loader, taken_settings
from .workers import WorkerInit, WorkersView, end_with_process, shut_down_workers, signals_blocked

logger = logging.getLogger("danling")


class KeyedStream(WorkersView, IterableDataset[Any]):
    """Batches of an iterable dataset, before each of which all randomness is seeded. A worker hands over its place with each of them.

    torch's CPU generator, NumPy, `random`, and the generators that the dataset or `collate_fn` holds are seeded with (seed, split, epoch,
    rank * workers + worker, number of the batch). What the method `__iter__` itself draws, unless it is a generator function, is
    seeded like the order of a sampler: alike on all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        split: str,
        epoch: int,
        every: int,
        rank: int = 0,
        collate_fn: object = None,
        make: Callable[[list[Any]], Any] = collate,
        size: int = 1,
        drop_last: bool = False,
        states: Mapping[int, Mapping[str, Any]] | None = None,
        first: int = 0,
    ) -> None:
        self.dataset = dataset
        self.seed, self.split, self.epoch, self.rank = seed, split, epoch, rank
        self.every = every
        self.collate_fn = collate_fn
        self.make, self.size, self.drop_last = make, size, drop_last
        self.states, self.first = dict(states or {}), first
        self.reader: StreamIterator | None = None
        """Reads in this process, if there are no workers."""

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | None, tuple[Any] | None]]:
        """Yield worker, its place (`None` in this process) and the batch; without a batch where it only takes its turn, or ends."""
        info = get_worker_info()
        worker = 0 if info is None else info.id
        reader = self.reader = StreamIterator(self)
        if worker in self.states:
            reader.load_state_dict(self.states[worker])
        if worker < self.first:
            yield worker, None, None
        while len(items := list(islice(reader, self.size))) == self.size or (items and not self.drop_last):
            yield worker, None if info is None else reader.state_dict(), (self.make(items),)
        if info is not None:
            yield worker, reader.state_dict(), None


class StreamIterator:
    """Iterates over a `KeyedStream`; its state is that of the dataset or its iterator, or the number of items."""

    def __init__(self, stream: KeyedStream) -> None:
        self.stream = stream
        info = get_worker_info()
        self._worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self._base = derive_seed(stream.seed, "read", stream.split, stream.epoch, stream.rank * workers + self._worker)
        # A stream of `datasets` never forgets the state that it was told: a later pass would begin there.
        self._dataset = _apart(stream.dataset) if _of_datasets(stream.dataset) else stream.dataset
        self._draws = stream.collate_fn is not None or not draws_nothing(stream.dataset)
        self._generators = Generators({"dataset": self._dataset, "collate_fn": stream.collate_fn})
        self._iterator: Iterator[Any] | None = None
        self._items = 0
        self._over = False

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> object:
        """Return the next item."""
        if self._over:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._begin()
        if self._draws and self._items % self.stream.every == 0:
            if self._items == self.stream.every:
                self._generators.look()  # for what the first batch has made
            self._seed(mix_seed(self._base, self._items // self.stream.every))
        try:
            item = next(self._iterator)
        except StopIteration:
            self._over = True
            raise
        self._items += 1
        return item

    def _begin(self) -> Iterator[Any]:
        stream = self.stream
        self._seed(derive_seed(stream.seed, "order", stream.split, stream.epoch))
        return iter(self._dataset)

    def _seed(self, seed: int) -> None:
        self._generators.seed(seed)
        seed_host_streams(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of items, and the state of the dataset or its iterator where they have one."""
        dataset, iterator = self._dataset, self._iterator
        held = iterator is not dataset and is_stateful(dataset)
        return {
            "items": self._items,
            "over": self._over,
            "epoch": self.stream.epoch,
            "dataset": to_plain(dataset.state_dict()) if held else None,
            "iterator": to_plain(iterator.state_dict()) if is_stateful(iterator) else None,  # type: ignore[union-attr]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place; without a state of the dataset's, what was read is read again and dropped."""
        why = _why_again(self.stream.dataset)
        dataset, iterator = (None, None) if why else (state["dataset"], state["iterator"])
        if dataset is not None:
            self._dataset.load_state_dict(from_plain(dataset))
        if state["over"] or state["epoch"] != self.stream.epoch:
            # A dataset may be at its beginning again by then.
            self._over = bool(state["over"] or state["items"])
        elif dataset is None and iterator is None:
            self._read_again(
                state["items"], why or "Give it, or the iterator that it returns, state_dict and load_state_dict."
            )
        elif state["items"] or iterator is not None:
            self._iterator = self._begin()
            if iterator is not None:
                self._iterator.load_state_dict(from_plain(iterator))  # type: ignore[attr-defined]
            self._items = state["items"]
            self._seed(mix_seed(self._base, self._items // self.stream.every))

    def _read_again(self, items: int, why: str) -> None:
        if items and self.stream.rank == 0 and self._worker == 0:
            logger.warning(
                "The dataset of split %r (%s) cannot be positioned: its first %d items of epoch %d are read again and dropped. %s",
                self.stream.split,
                type(self.stream.dataset).__name__,
                items,
                self.stream.epoch,
                why,
            )
        for _ in range(items):
            next(self)


def _of_datasets(dataset: object) -> bool:
    return type(dataset).__module__.startswith("datasets.")


def _apart(dataset: Any) -> Any:
    # `copy.copy` would share the attributes, see its `__setstate__`.
    twin = object.__new__(type(dataset))
    vars(twin).update(vars(dataset))
    return twin


def _why_again(dataset: object) -> str | None:
    """Return why the state of a stream of `datasets` is not enough to go on from, `None` where it is."""
    waiting = [getattr(dataset, "_ex_iterable", None)] if _of_datasets(dataset) else []
    makes_groups = False
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return "Its state leaves out what its shuffle buffer holds."
        makes_groups |= bool(getattr(part, "batched", False))
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        waiting += [found for found in inner if found is not None]
    if makes_groups and not draws_nothing(dataset):
        return (
            "It makes rows in groups (batched=True), of which a part cannot be made again alone if random numbers are drawn for them. Set "
            "draws_random = False on it if none are."
        )
    return None


class StreamLoader(DataLoader[Any]):
    """A loader over an iterable dataset, with its randomness keyed; see `KeyedStream`. Its state is the place of each worker.

    Workers are made anew for each pass, so that what a pass is does not depend on what they read before.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int = 0,
        rank: int = 0,
        split: str = "train",
        keyed: str = "batch",
        batch_size: int | None = 1,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.split, self.seed, self.rank, self.keyed = split, seed, rank, keyed
        self.epoch = 0
        if is_stateful(dataset):
            check_savable(dataset, split)
        if settings.pop("persistent_workers", False) and settings.get("num_workers") and rank == 0:
            logger.info(
                "Split %r is an IterableDataset: its workers are made anew for each pass, to read alike.", split
            )
        self._own_collate = None if collate_fn in (default_collate, default_convert) else collate_fn
        if collate_fn in (None, default_collate):
            collate_fn = default_convert if batch_size is None else collate
        self._collate: Callable[[list[Any]], Any] = collate_fn
        settings.update(worker_init_fn=WorkerInit(settings.get("worker_init_fn")), collate_fn=as_is)
        super().__init__(dataset, batch_size=None, generator=torch.Generator().manual_seed(0), **settings)
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)
        self._stream: KeyedStream | None = None
        self._states: dict[int, dict[str, Any]] = {}
        self._first = 0
        self._is_loaded = False
        if self.num_workers:
            end_with_process(self)

    @property
    def is_read_again(self) -> bool:
        """Whether a resumed pass is read from its beginning up to the position, since the dataset keeps no place itself."""
        return not is_stateful(self.dataset) or _why_again(self.dataset) is not None

    def set_epoch(self, epoch: int) -> None:
        """Prepare a pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the batches of a pass, from the place on that was loaded."""
        if not self._is_loaded:
            self._states, self._first = {}, 0
        self._is_loaded = False
        shut_down_workers(self)
        self._iterator = super().__iter__()
        return self._taken(self._iterator)

    def _taken(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for worker, state, batch in iterator:
            if state is not None:
                self._states[worker] = state
            if batch is not None:
                self._first = (worker + 1) % (self.num_workers or 1)
                yield batch[0]

    def _get_iterator(self) -> Any:
        # The iterator sees the keyed view; `loader.dataset` is the user's own dataset.
        view = copy.copy(self)
        size = self.batch_size
        self._stream = view.__dict__["dataset"] = KeyedStream(
            self.dataset,
            self.seed,
            split=self.split,
            epoch=self.epoch,
            every=1 if self.keyed == "sample" else size or 1,
            rank=self.rank,
            collate_fn=self._own_collate,
            make=self._collate if size is not None else partial(_made_of_one, self._collate),
            size=size or 1,
            drop_last=self.drop_last,
            states=self._states,
            first=self._first,
        )
        view.__dict__["batch_size"] = None
        with signals_blocked():
            return super(StreamLoader, view)._get_iterator()

    def state_dict(self) -> dict[str, Any]:
        """Return the place of each worker that has given a batch, and whose turn it is."""
        reader = None if self._stream is None else self._stream.reader
        states = {0: reader.state_dict()} if reader is not None and not self.num_workers else self._states
        return {"workers": {str(worker): state for worker, state in states.items()}, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place, from which the next iterator begins."""
        self._states = {int(worker): place for worker, place in state["workers"].items()}
        self._first = state["first"]
        self._is_loaded = True


def _made_of_one(collate_fn: Callable[[Any], Any], items: list[Any]) -> Any:
    return collate_fn(items[0])


def stream_twin(loader: Any, *, split: str, seed: int, rank: int = 0) -> StreamLoader | None:
    """Return a loader that reads what a loader of the user's does, with randomness keyed. The user's own is not touched."""
    dataset = getattr(loader, "dataset", None)
    if not is_plain_loader(loader) or not isinstance(dataset, IterableDataset) or isinstance(dataset, IterDataPipe):
        return None
    settings = taken_settings(loader, "batch_size", "drop_last", "collate_fn")
    return StreamLoader(dataset, split=split, seed=seed, rank=rank, **settings)
