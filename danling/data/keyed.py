"""What loaders of the library read in place of the user's dataset: before it reads, all randomness is seeded by the place in the pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info
from torch.utils.data._utils.collate import default_convert

from danling.utils.tensors import shapes_of

from .collation import collate
from .dataset_state import (
    changed_attributes,
    from_plain,
    get_states,
    is_equal,
    is_stateful,
    parts_of,
    plain_attributes,
    stateful_parts,
    to_plain,
)
from .randomness import Generators, derive_seed, mix_seed
from .sampler import BatchKey, Share
from .workers import WorkersView

logger = logging.getLogger("danling")

_SHAPES = 3
"""How many other shapes of samples a note names."""


class KeyedDataset(WorkersView, Dataset[Any]):
    """A map-style dataset that is asked for batches by `BatchKey`, and seeds all randomness before it reads.

    torch's CPU generator, NumPy, `random`, and the generators that the dataset, its transforms or `collate_fn` hold are seeded with
    (seed, split, epoch, position): a batch is the same in any worker and after a resume. Generators are looked for at the beginning of a
    pass and after its first batch: where that has made one, it is keyed too, and the batch is read once more. A dataset that cannot draw is
    not seeded, unless there is a `collate_fn`, which is then seeded once a batch.
    """

    def __init__(
        self,
        dataset: object,
        seed: int,
        *,
        split: str = "train",
        by: str = "batch",
        ranks: tuple[int, ...] = (),
        collate_fn: Callable[[Any], Any] | None = None,
        make: Callable[[Any], Any] | None = None,
        is_watched: bool = False,
    ) -> None:
        self.dataset = dataset
        self.is_watched = is_watched
        """Whether the first worker names what reading changes in its copy."""
        self._seen: dict[str, object] | None = None
        """Numbers and texts of the dataset after the first batch of a worker."""
        self.seed, self.split, self.ranks = seed, split, ranks
        self.collate_fn = collate_fn
        """The user's, which may draw random numbers."""
        self._make = collate_fn if make is None else make
        self.draws = not draws_nothing(dataset)
        self.by_sample = self.draws and by == "sample"
        self.reads_batches = reads_batches(dataset) and not self.by_sample
        self._generators: Any = None
        """Those to seed; `None` where nothing draws."""
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
        """Return the one item of a key, through `collate_fn` where there is one."""
        return self.__getitems__(key, single=True)

    def __getitems__(self, key: BatchKey, *, single: bool = False) -> Any:
        """Return the items of a key, or what `collate_fn` makes of them."""
        is_first, self._epoch = key.epoch != self._epoch, key.epoch
        if is_first:
            # In this process the state is saved with the position; only copies in workers may not change it.
            self._parts = stateful_parts(self.dataset) if get_worker_info() is not None else {}
            self._found = get_states(self._parts)
            if self.draws or self.collate_fn is not None:
                self._base = derive_seed(self.seed, "read", self.split, key.epoch, *self.ranks)
                if self._generators is None:
                    drawing = {"dataset": self.dataset} if self.draws else {}
                    self._generators = Generators({**drawing, "collate_fn": self.collate_fn})
                else:
                    self._generators.look()
        data = self._read(key, single)
        if self._parts and not is_equal(get_states(self._parts), self._found):
            raise RuntimeError(
                f"Expected dataloader.num_workers=0 for split {self.split!r}: reading changes the state of its dataset, "
                f"{type(self.dataset).__name__}, of which each worker has a copy that is not saved. Received: a worker. Set it to 0, or "
                "let what changes follow from set_epoch."
            )
        is_new = is_first and self._generators is not None and self._generators.look()
        if is_new:
            data = self._read(key, single)
        if self.is_watched:
            self._name_changed()
        return data

    def _name_changed(self) -> None:
        """Name once the numbers and texts of the dataset that reading changes in a worker, whose copy no save looks at.

        What the first batch sets may be made at first use; what the second one changes too is a count, or follows from one.
        """
        info = get_worker_info()
        if info is None:
            return
        now = plain_attributes(self.dataset)
        if self._seen is None and info.id == 0:
            self._seen = now
            return
        self.is_watched = False
        names = changed_attributes(self._seen or now, now)
        if names:
            logger.warning(
                "Reading changes the dataset of split %r (%s): %s. Each of its workers changes a copy, which is in no checkpoint and "
                "is lost with the worker: if samples depend on it, a resumed run reads others. Let it follow from the index or from "
                "set_epoch.",
                self.split,
                type(self.dataset).__name__,
                ", ".join(sorted(name.removeprefix(".") for name in names)),
            )

    def _read(self, key: BatchKey, single: bool) -> object:
        dataset, indices = self.dataset, key.indices
        if self._generators is not None:
            self._generators.seed(mix_seed(self._base, key.position))
        index: object = None
        try:
            if single:
                index = indices[0]
                items = dataset[index]
            elif self.reads_batches:
                items = dataset.__getitems__(list(indices))
            else:
                # A loop, so that an error below knows the index.
                items = []
                for position, index in enumerate(indices, key.position):
                    if self.by_sample and items:  # the first one has the seed of the batch
                        self._generators.seed(mix_seed(self._base, position))
                    items.append(dataset[index])
        except StopIteration as error:  # with which a pass would end in silence
            raise RuntimeError(
                "Expected a dataset that has an item at each index below its length. Received: StopIteration from one of the items "
                f"{indices}. Fix its __getitem__, or shorten its __len__."
            ) from error
        except Exception as error:
            self._note(error, indices if index is None else index)
            raise
        if self._make is None:
            return items
        try:
            return self._make(items)
        except Exception as error:
            note_samples(error, self.split, indices, [items] if single else items)
            raise

    def _note(self, error: Exception, index: object) -> None:
        """Add to an error of the dataset which sample it was, and how many the dataset says that it has."""
        which = f"samples {index}" if isinstance(index, list) else f"sample {index!r}"
        length, hint = "", ""
        with suppress(Exception):
            length = f", a {type(self.dataset).__name__} whose len() is {len(self)}"
        if length and isinstance(error, (IndexError, KeyError)):
            hint = ". If it has fewer samples, fix its __len__"
        error.add_note(f"Reading {which} of split {self.split!r} failed{length}{hint}.")


def note_samples(error: Exception, split: str, names: Sequence[object], samples: Any) -> None:
    """Add to an error of what makes a batch the shapes of its samples, with one sample for each of them.

    Args:
        error: The error.
        split: The split.
        names: What the samples are called: indices, or numbers in a stream.
        samples: The samples, or whatever `__getitems__` returned.
    """
    if not isinstance(samples, (list, tuple)) or len(samples) != len(names):
        error.add_note(f"Samples {list(names)} of split {split!r} could not be made into a batch.")
        return
    by_shape: dict[str, list[object]] = {}
    for name, sample in zip(names, samples):
        by_shape.setdefault(shapes_of(sample), []).append(name)
    common, *others = sorted(by_shape.items(), key=lambda item: -len(item[1]))
    text = f"{len(samples)} samples of split {split!r} could not be made into a batch: sample {common[1][0]!r} is {common[0]}"
    text += "".join(f", sample {found[0]!r} is {shape}" for shape, found in others[:_SHAPES])
    error.add_note(f"{text}.")


def reads_batches(dataset: object) -> bool:
    """Return whether the dataset reads a batch at once, by `__getitems__`; that of a `Subset` only loops over what it is a part of."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return callable(getattr(inner, "__getitems__", None)) and callable(
        getattr(dataset, "__getitems__", None)
    )


def draws_nothing(dataset: object) -> bool:
    """Return whether the dataset is known to draw no random numbers, or says so. Subclasses may, so types are compared exactly."""
    said = getattr(dataset, "draws_random", None)
    if isinstance(said, bool):
        return not said
    if said is not None:
        raise ValueError(
            f"Expected {type(dataset).__name__}.draws_random to be True or False. Received: draws_random={said!r} "
            f"({type(said).__name__}). Set it to whether reading a sample draws random numbers, or leave it out."
        )
    parts = parts_of(dataset)
    if parts is not None:
        return all(map(draws_nothing, parts.values()))
    return type(dataset) in (TensorDataset, list, tuple, range, Tensor)


@dataclass(eq=False)
class KeyedStream(WorkersView, IterableDataset[Any]):
    """Batches of an iterable dataset, before each of which all randomness is seeded. A worker hands over its place with each of them.

    torch's CPU generator, NumPy, `random`, and the generators that the dataset or `collate_fn` holds are seeded with (seed, split, epoch,
    rank * workers + worker, number of the batch). What the method `__iter__` itself draws, unless it is a generator function, is
    seeded like the order of a sampler: alike on all ranks.
    """

    dataset: Any
    share: Share
    epoch: int
    every: int
    """Items that are seeded at a time."""
    make: Callable[[Any], Any]
    size: int | None
    drop_last: bool
    states: dict[int, dict[str, Any]]
    first: int

    has_begun = False
    _worker = _base = _items = 0
    _over = False
    _read: Any = field(default=None, init=False)
    """The dataset, or the copy of it that is iterated."""
    _iterator: Any = field(default=None, init=False)
    _generators: Any = field(default=None, init=False)
    _end: Mapping[str, Any] | None = field(default=None, init=False)
    """The place that it was told, where that is the end of the pass: nothing is read then."""

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any] | None, tuple[Any] | None]]:
        """Yield worker, its place (`None` in this process) and the batch; without a batch where it only takes its turn, or ends."""
        info = get_worker_info()
        self._worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self._base = self._derived("read", self.share.rank * workers + self._worker)
        # A stream of `datasets` never forgets the state that it was told: a later pass would begin there.
        self._read = _twin(self.dataset) if _of_datasets(self.dataset) else self.dataset
        own = None if self.make in (collate, default_convert) else self.make
        self._generators = Generators({"dataset": self._read, "collate_fn": own})
        self._draws = own is not None or not draws_nothing(self.dataset)
        self.has_begun = True
        if self._worker in self.states:
            self._go_to(self.states[self._worker])
        if self._worker < self.first:
            # torch asks the workers in turn from the first one on; the pass was left when it was the turn of another one.
            yield self._worker, None, None
        size = self.size or 1
        while len(items := self._take(size)) == size or (items and not self.drop_last):
            place = None if info is None else self.place()
            yield self._worker, place, (self._batch(items),)
        if info is not None:
            yield self._worker, self.place(), None

    def _batch(self, items: list[Any]) -> Any:
        try:
            return self.make(items[0] if self.size is None else items)
        except Exception as error:
            note_samples(
                error, self.share.split, range(self._items - len(items), self._items), items
            )
            raise

    def _take(self, number: int) -> list[object]:
        """Return the next items, fewer at the end."""
        items: list[Any] = []
        while len(items) < number and not self._over:
            if self._iterator is None:
                self._iterator = self._begin()
            if self._draws and self._items % self.every == 0:
                if self._items == self.every:
                    self._generators.look()  # for what the first batch has made
                self._generators.seed(mix_seed(self._base, self._items // self.every))
            try:
                items.append(next(self._iterator))
                self._items += 1
            except StopIteration:
                self._over = True
            except Exception as error:
                of_worker = f", worker {self._worker}" if get_worker_info() is not None else ""
                error.add_note(
                    f"Reading item {self._items} of split {self.share.split!r} failed (a {type(self.dataset).__name__}, pass "
                    f"{self.epoch}, rank {self.share.rank}{of_worker})."
                )
                raise
        return items

    def _begin(self) -> Iterator[Any]:
        self._generators.seed(self._derived("order"))
        return iter(self._read)

    def _derived(self, purpose: str, *more: int) -> int:
        return derive_seed(self.share.seed, purpose, self.share.split, self.epoch, *more)

    def place(self) -> dict[str, object]:
        """Return the number of items, and the state of the dataset or its iterator where they have one."""
        if self._end is not None:
            return dict(self._end)
        dataset, iterator = self._read, self._iterator
        held = iterator is not dataset and is_stateful(dataset)
        return {
            "items": self._items,
            "over": self._over,
            "epoch": self.epoch,
            "dataset": to_plain(dataset.state_dict()) if held else None,
            "iterator": to_plain(iterator.state_dict()) if is_stateful(iterator) else None,
        }

    def _go_to(self, place: Mapping[str, Any]) -> None:
        """Go to a place; without a state of the dataset's, what was read is read again and dropped."""
        why, items = why_read_again(self.dataset), place["items"]
        dataset, iterator = (None, None) if why else (place["dataset"], place["iterator"])
        if dataset is not None:
            self._read.load_state_dict(from_plain(dataset))
        if place["over"] or place["epoch"] != self.epoch:
            # This worker's part of the pass has been read. A dataset may be at its beginning again by then.
            self._over = bool(place["over"] or items)
            if place["over"] and place["epoch"] == self.epoch:
                self._end = place
        elif dataset is None and iterator is None:
            if items and self.share.rank == 0 and self._worker == 0:
                logger.warning(
                    "The dataset of split %r (%s) cannot be positioned: its first %d items of epoch %d are read again and dropped. %s",
                    self.share.split,
                    type(self.dataset).__name__,
                    items,
                    self.epoch,
                    why
                    or "Give it, or the iterator that it returns, state_dict and load_state_dict.",
                )
            for number in range(items):
                if not self._take(1):
                    raise ValueError(
                        f"Expected the dataset of split {self.share.split!r} to have at least {items} items, which were consumed when the "
                        f"run was saved. Received: {number} items. Restore the dataset, or exclude 'dataloaders' from loading."
                    )
        elif items or iterator is not None:
            self._iterator = self._begin()
            if iterator is not None:
                self._iterator.load_state_dict(from_plain(iterator))
            self._items = items
            self._generators.seed(mix_seed(self._base, items // self.every))


def _of_datasets(dataset: object) -> bool:
    return type(dataset).__module__.startswith("datasets.")


def _twin(dataset: object) -> Any:
    # `copy.copy` of such a dataset shares one dictionary of attributes, by its `__setstate__`.
    twin = object.__new__(type(dataset))
    vars(twin).update(vars(dataset))
    return twin


def why_read_again(dataset: object) -> str | None:
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
