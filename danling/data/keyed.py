"""Reads map-style datasets with all randomness keyed by the place of a batch, or of a sample, in its pass."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler, Subset, TensorDataset, get_worker_info

from .collation import collate
from .dataset_state import check_savable, get_states, is_equal, parts_of, set_states, stateful_parts
from .generators import Generators
from .order import OrderedDataset
from .randomness import derive_seed, mix_seed, seed_host_streams
from .workers import WorkerInit, WorkersView, end_with_process, shut_down_workers, signals_blocked

KEYED = ("batch", "sample")
"""What reading is seeded by."""


class BatchKey(NamedTuple):
    """What a worker is asked for.

    Attributes:
        epoch: The pass.
        position: Position, in the order of the pass, of the first sample.
        indices: What the sampler names the samples by; a single one where batches are not made.
    """

    epoch: int
    position: int
    indices: Any


class KeyedDataset(WorkersView, Dataset[Any]):
    """A map-style dataset that is asked for batches by `BatchKey`, and seeds all randomness before it reads.

    torch's CPU generator, NumPy, `random`, and the generators that the dataset, its transforms or `collate_fn` hold are seeded with
    (seed, split, epoch, position): a batch is the same in any worker and after a resume. Generators are looked for at the beginning of a
    pass and after its first batch: where that has made one, it is keyed too, and the batch is read once more. A dataset that cannot draw is
    not seeded, unless there is a `collate_fn`, which is then seeded once a batch.

    Args:
        dataset: The dataset.
        seed: Base seed.
        split: Name of the split.
        by: `"batch"` seeds before each batch; `"sample"` before each sample with its own position, and reads them one by one.
        ranks: The rank, if each rank has its own order; else empty.
        collate_fn: The user's, which makes the batch; `None` leaves that to the loader.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        *,
        split: str = "train",
        by: str = "batch",
        ranks: tuple[int, ...] = (),
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.seed, self.split, self.ranks = seed, split, ranks
        self.collate_fn = collate_fn
        self.draws = not draws_nothing(dataset)
        self.by_sample = self.draws and by == "sample"
        self.reads_batches = reads_batches(dataset) and not self.by_sample
        self._generators: Generators | None = None
        self._epoch = -1
        self._base = 0
        self._parts: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        """The parts of a worker's copy that have a state, and these as the pass found them."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, object]:
        # A worker looks for the generators of its own copy.
        return {**self.__dict__, "_generators": None, "_epoch": -1}

    def __getitem__(self, key: BatchKey) -> Any:
        """Return the item of a key, through `collate_fn` where there is one."""
        return self._settled(key, single=True)

    def __getitems__(self, key: BatchKey) -> Any:
        """Return the items of a key, or what `collate_fn` makes of them."""
        return self._settled(key, single=False)

    def _settled(self, key: BatchKey, *, single: bool) -> Any:
        is_first, self._epoch = key.epoch != self._epoch, key.epoch
        if is_first:
            self._parts = stateful_parts(self.dataset) if get_worker_info() is not None else {}
            self._found = get_states(self._parts)
        if is_first and (self.draws or self.collate_fn is not None):
            self._base = derive_seed(self.seed, "read", self.split, key.epoch, *self.ranks)
            self._generators = self._generators or Generators(self._roots())
            self._generators.look()
        data = self._read(key, single)
        if self._parts and not is_equal(get_states(self._parts), self._found):
            raise RuntimeError(
                f"Expected dataloader.num_workers=0 for split {self.split!r}: reading changes the state of its dataset, "
                f"{type(self.dataset).__name__}, of which each worker has a copy that is not saved. Received: a worker. Set it to 0, or "
                "let what changes follow from set_epoch."
            )
        is_new = is_first and self._generators is not None and self._generators.look()
        return self._read(key, single) if is_new else data

    def _roots(self) -> dict[str, object]:
        return {**({"dataset": self.dataset} if self.draws else {}), "collate_fn": self.collate_fn}

    def _read(self, key: BatchKey, single: bool) -> Any:
        if self._generators is not None:
            self._seed(key.position)
        try:
            items = self.dataset[key.indices] if single else self._items(key)
        except StopIteration as error:  # with which a pass would end in silence
            raise RuntimeError(
                "Expected a dataset that has an item at each index below its length. Received: StopIteration from one of the items "
                f"{key.indices}. Mend its __getitem__, or shorten its __len__."
            ) from error
        return items if self.collate_fn is None else self.collate_fn(items)

    def _items(self, key: BatchKey) -> Any:
        if self.reads_batches:
            return self.dataset.__getitems__(list(key.indices))
        if not self.by_sample:
            return [self.dataset[index] for index in key.indices]
        items = []
        for position, index in enumerate(key.indices, key.position):
            if position > key.position:
                self._seed(position)
            items.append(self.dataset[index])
        return items

    def _seed(self, position: int) -> None:
        seed = mix_seed(self._base, position)
        if self._generators:
            self._generators.seed(seed)
        seed_host_streams(seed)


def reads_batches(dataset: object) -> bool:
    """Return whether the dataset reads a batch at once, by `__getitems__`; that of a `Subset` only loops over what it is a part of."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return callable(getattr(inner, "__getitems__", None)) and callable(getattr(dataset, "__getitems__", None))


def draws_nothing(dataset: object) -> bool:
    """Return whether the dataset is known to draw no random numbers, or says so. Subclasses may, so types are compared exactly."""
    said = declared_draws(dataset)
    if said is not None:
        return not said
    parts = parts_of(dataset)
    if parts is not None:
        return all(map(draws_nothing, parts.values()))
    return type(dataset) in (TensorDataset, list, tuple, range, Tensor)


def declared_draws(dataset: object) -> bool | None:
    """Return the attribute `draws_random` of a dataset, `None` where there is none."""
    said = getattr(dataset, "draws_random", None)
    if said is None or isinstance(said, bool):
        return said
    raise ValueError(
        f"Expected {type(dataset).__name__}.draws_random to be True or False. Received: draws_random={said!r} "
        f"({type(said).__name__}). Say whether reading a sample draws random numbers, or leave it out."
    )


def index_number(index: Any) -> int:
    """Return an integer for what a sampler names a sample by: the index itself, or a number of 63 bits made from it."""
    try:
        return operator.index(index)
    except TypeError:
        return derive_seed(repr(index))


class KeySampler(Sampler[BatchKey]):
    """The keys of an order of batches, for a loader."""

    def __init__(self, order: Any, *, batched: bool) -> None:
        self.order = order
        self.batched = batched

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[BatchKey]:
        keys: Iterator[BatchKey] = self.order.keys()
        return keys if self.batched else (key._replace(indices=key.indices[0]) for key in keys)


def as_is(data: object) -> Any:
    """Return a batch that is already made."""
    return data


class KeyedLoader(TorchDataLoader[Any]):
    """A loader whose sampler yields a `BatchKey` for each batch, and that seeds before it reads; see `KeyedDataset`."""

    dataset: Any

    def __init__(
        self,
        dataset: object,
        order: Any,
        *,
        batch_size: int | None,
        drop_last: bool,
        split: str,
        batched: bool,
        ranks: tuple[int, ...] = (),
        keyed: str = "batch",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.order = order
        self.split, self.keyed = split, keyed
        self._ranks = ranks
        keys = KeySampler(order, batched=batched)
        self._collates = collate_fn is not None
        draws_nothing(dataset)  # refuses a declaration that is none
        self.stateful = stateful_parts(dataset)
        for part in self.stateful.values():
            check_savable(part, split)
        super().__init__(
            dataset,  # type: ignore[arg-type]
            batch_size=1 if batched else None,
            sampler=None if batched else keys,
            batch_sampler=keys if batched else None,  # type: ignore[arg-type]
            collate_fn=collate if collate_fn is None and batched else collate_fn,
            num_workers=num_workers,
            worker_init_fn=WorkerInit(worker_init_fn),
            generator=torch.Generator().manual_seed(0),
            **settings,
        )
        # torch forgets both when it is given a batch sampler, and refuses to have them set.
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)
        if num_workers:
            end_with_process(self)

    @property
    def seed(self) -> int:
        """Base seed of order and randomness."""
        return int(self.order.seed)

    @property
    def epoch(self) -> int:
        """The pass that the position is in."""
        return int(self.order.epoch)

    @property
    def consumed(self) -> int:
        """How far the pass is consumed: samples over all ranks, or batches of this rank in the order of a sampler of the user's."""
        return int(self.order.consumed)

    def __iter__(self) -> Any:
        """Return an iterator over the batches from the position to the end of the pass."""
        told = hasattr(self.dataset, "set_epoch")
        if isinstance(self.dataset, OrderedDataset):
            self.dataset.set_seed(self.seed)
        if told:
            self.dataset.set_epoch(self.epoch)
        if told or self.stateful:
            # Persistent workers have copies of the dataset that would not hear of it.
            shut_down_workers(self)
        if not self.num_workers and not self.pin_memory:
            return self._read_here()
        self._iterator = super().__iter__()
        return self._iterator

    def _get_iterator(self) -> Any:
        # The iterator sees keys; `loader.dataset` is the user's own dataset.
        view = copy.copy(self)
        view.__dict__["dataset"] = self._reading()
        if self._collates:
            view.__dict__["collate_fn"] = as_is
        with signals_blocked():
            return super(KeyedLoader, view)._get_iterator()

    def _reading(self) -> KeyedDataset:
        return KeyedDataset(
            self.dataset,
            self.seed,
            split=self.split,
            by=self.keyed,
            ranks=self._ranks,
            collate_fn=self.collate_fn if self._collates else None,
        )

    def _read_here(self) -> Iterator[object]:
        """Read in this process, without the bookkeeping that torch has for processes."""
        reading = self._reading()
        batched = self.batch_sampler is not None
        read = reading.__getitems__ if batched else reading.__getitem__
        finish = as_is if self._collates else self.collate_fn
        # Taken here and not where the first batch is asked for: moving the position must not disturb the iterator.
        keys: Iterator[Any] = iter(self.sampler if self.batch_sampler is None else self.batch_sampler)
        # Not a chain of `map`: that takes a StopIteration of the user's for its own end.
        return (finish(read(key)) for key in keys)

    def held_state(self) -> dict[str, object]:
        """Return the dataset's own state under `dataset`, if it has one."""
        return {"dataset": get_states(self.stateful)} if self.stateful else {}

    def load_held_state(self, state: Mapping[str, Any]) -> None:
        """Put the dataset into the state that `held_state` returned.

        Raises:
            ValueError: If that is of other parts.
        """
        saved = state.get("dataset", {})
        if self.stateful and saved.keys() != self.stateful.keys():
            raise ValueError(
                f"Expected the state of what has state_dict in the dataset of split {self.split!r} ({', '.join(self.stateful)}). Received: "
                f"that of {', '.join(saved) or 'none'}. Restore the dataset that the run was saved with, or exclude 'dataloaders' from "
                "loading."
            )
        set_states(self.stateful, saved)

    def close(self) -> None:
        """End the worker processes; the loader can be iterated again."""
        shut_down_workers(self)
