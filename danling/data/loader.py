"""The loaders that the library makes: over map-style datasets in its own order, and over iterable datasets."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_collate, default_convert

from .collation import collate
from .dataset_state import (
    DatasetCopies,
    check_savable,
    get_states,
    is_equal,
    is_stateful,
    set_epoch_of,
    set_states,
    stateful_parts,
)
from .keyed import KeyedDataset, KeyedStream, draws_nothing, why_read_again
from .order import OrderedDataset, length_of
from .sampler import Batch, Division, PositionedBatchSampler, Share
from .workers import WorkerInit, end_with_process, shut_down_workers, signals_blocked


class _Placeholder:
    def __repr__(self) -> str:
        return "PLACEHOLDER"


PLACEHOLDER = _Placeholder()
"""The data of a batch that this rank does not read."""


class LibraryLoader(TorchDataLoader[Any]):
    """A loader of torch whose workers read a view of the user's dataset, which seeds before it reads. `loader.dataset` is the user's."""

    dataset: Any

    def __init__(
        self,
        dataset: object,
        *,
        batch_size: int | None,
        drop_last: bool,
        worker_init_fn: Callable[[int], Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]
            # With a batch sampler torch takes only 1.
            batch_size=1 if "batch_sampler" in settings else None,
            worker_init_fn=WorkerInit(worker_init_fn),
            # torch would draw the seeds of its workers from the global stream, and so move it.
            generator=torch.Generator().manual_seed(0),
            **settings,
        )
        # torch does not know both where batches are made by the view, and refuses to have them set.
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)
        if self.num_workers:
            end_with_process(self)

    @abstractmethod
    def _view(self) -> dict[str, Any]:
        """Return the attributes that an iterator finds in place of those of this loader."""

    def _get_iterator(self) -> Any:
        # torch's iterator takes what it reads from the loader that makes it, and workers get a copy of all of it.
        view = copy.copy(self)
        view.__dict__.update(self._view())
        with signals_blocked():
            return super(LibraryLoader, view)._get_iterator()

    def close(self) -> None:
        """End the worker processes; the loader can be iterated again."""
        shut_down_workers(self)


class KeyedLoader(LibraryLoader):
    """A loader over a map-style dataset that reads the keys of an order, seeds before it reads, and has a position; see `KeyedDataset`.

    Iterating begins at the position, which is that of `order` and moves when `order.advance` says that batches were consumed.

    Args:
        dataset: A map-style dataset.
        order: The keys from the position on, and the position: a `PositionedBatchSampler`, or the `SampledBatches` of a user's sampler.
        batch_size: Samples of a batch, as the loader shows it.
        batched: Whether a key makes a batch; else the item of its one index is delivered as it is.
        keyed: What reading is seeded by, `batch` or `sample`.
        settings: Further arguments of `torch.utils.data.DataLoader`. Without a `collate_fn`, a batch is made by torch's, with samples of
            some libraries put together by these.

    Attributes:
        stateful: The parts of the dataset with a state, by path.
        set_by_epoch: Attributes of the dataset that its `set_epoch` has changed.
        is_ahead: Whether the state of the dataset was changed since the workers got copies of it; as of the last save.
    """

    def __init__(
        self,
        dataset: object,
        order: Any,
        *,
        batch_size: int | None,
        batched: bool,
        drop_last: bool = False,
        keyed: str = "batch",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.order, self.split, self.keyed = order, order.split, keyed
        self.kind: str = order.kind
        self.length_is_known: bool = order.length_is_known
        self._own_collate = collate_fn
        draws_nothing(dataset)  # refuses a declaration that is none
        self.stateful = stateful_parts(dataset)
        self.set_by_epoch: set[str] = set()
        self.is_ahead = False
        self._is_watched = order.rank == 0
        self._copies: DatasetCopies | None = None
        """What the dataset was like when workers that are kept began."""
        self._copied_states: dict[str, object] | None = None
        """The states of its parts when workers began."""
        for part in self.stateful.values():
            check_savable(part, self.split)
        key = "batch_sampler" if batched else "sampler"
        settings[key] = order
        if batched and collate_fn is None:
            collate_fn = collate
        super().__init__(
            dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=collate_fn, **settings
        )

    @property
    def is_rank_local(self) -> bool:
        """Whether each rank has its own state to save: that of a sampler of the user's, or of the dataset."""
        return not self.length_is_known or bool(self.stateful)

    def micro_batches(self, *, read: bool) -> Iterator[Batch]:
        """Return the batches from the position on, with their sample counts and places. Padding has 0 samples.

        Args:
            read: Whether their data is needed; else it is `PLACEHOLDER`, without end where a user's sampler gives the order.
        """
        left = self.order.remaining_batches()
        knows_length = read or self.length_is_known
        if left == 0 and knows_length:
            return iter(())
        data = iter(self) if read else repeat(PLACEHOLDER)
        batches: Iterator[Batch] = self.order.batches(data)
        if self.batch_sampler is None:  # only the dataset knows how many samples an item holds
            return (
                each._replace(samples=0 if each.samples == 0 else None, total=None, read=None)
                for each in batches
            )
        return batches

    def __iter__(self) -> Any:
        """Return an iterator over the batches from the position to the end of the pass."""
        takes_epoch = hasattr(self.dataset, "set_epoch")
        if isinstance(self.dataset, OrderedDataset):
            self.dataset.set_seed(self.order.seed)
        self.tell_epoch()
        has_changed = takes_epoch or bool(self.stateful)
        if not has_changed and self._copies is not None:
            has_changed = self._copies.differ_from(self.dataset)
        if has_changed:
            # Persistent workers have copies of the dataset, which do not change with it.
            shut_down_workers(self)
        if self.persistent_workers:
            self._copies = DatasetCopies(self.dataset)
        self._copied_states = (
            get_states(self.stateful) if self.stateful and self.num_workers else None
        )
        if self.num_workers or self.pin_memory:
            self._iterator = super().__iter__()
            return self._iterator
        # In this process, without the bookkeeping that torch has for processes. The keys are taken here and not where the first batch is
        # asked for: moving the position must not disturb the iterator. Not a chain of `map`: that takes a StopIteration of the user's for
        # its own end.
        dataset = self._view()["dataset"]
        keys = iter(self.order)
        read = dataset.__getitem__ if self.batch_sampler is None else dataset.__getitems__
        return (read(key) for key in keys)

    def tell_epoch(self) -> None:
        """Call `set_epoch` of the dataset with the pass of the position."""
        if hasattr(self.dataset, "set_epoch"):
            self.set_by_epoch |= set_epoch_of(self.dataset, self.order.epoch)

    def _view(self) -> dict[str, Any]:
        own = self._own_collate
        # Workers that begin later would say it again.
        is_watched, self._is_watched = self._is_watched, False
        dataset = KeyedDataset(
            self.dataset,
            self.order.seed,
            split=self.split,
            by=self.keyed,
            ranks=self.order.ranks,
            collate_fn=own,
            make=self.collate_fn,
            is_watched=is_watched,
        )
        return {"dataset": dataset, "collate_fn": _as_is}

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.order.set_epoch(epoch)

    def _go_to_pass(self, state: Mapping[str, Any]) -> None:
        """Tell the dataset the pass of a saved position, from which its length may follow."""
        if "epoch" in state and not isinstance(self.dataset, OrderedDataset):
            self.order.set_epoch(state["epoch"])
            self.tell_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, what tells whether it fits, and the dataset's own state, if it has one."""
        state: dict[str, Any] = self.order.state_dict()
        if self.stateful:
            state["dataset"] = get_states(self.stateful)
            copied = self._copied_states
            self.is_ahead = copied is not None and not is_equal(copied, state["dataset"])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Another number of workers does not matter.

        Raises:
            ValueError: If it does not fit the order or the dataset.
        """
        if state["seed"] != self.order.seed:
            self.close()  # workers that are kept hold a copy of the old seed
        self._go_to_pass(state)
        self.order.load_state_dict(state)
        saved = state.get("dataset", {})
        if self.stateful and saved.keys() != self.stateful.keys():
            raise ValueError(
                f"Expected the state of what has state_dict in the dataset of split {self.split!r} ({', '.join(self.stateful)}). Received: "
                f"that of {', '.join(saved) or 'none'}. Restore the dataset that the run was saved with, or exclude 'dataloaders' from "
                "loading."
            )
        set_states(self.stateful, saved)


def _as_is(data: object) -> Any:
    """Return a batch that is already made."""
    return data


class DataLoader(KeyedLoader):
    """A loader in the order of the library, whose position is restored exactly.

    Its state is (seed, epoch, consumed), which determines everything that is read: the number of workers, their
    prefetched batches and the number of ranks do not matter. Iterating begins at the position; the position moves when
    `order.advance` says that batches were consumed. `len(loader)` is the number of batches of a whole pass on this rank.

    Args:
        dataset: A map-style dataset.
        share: The share of this rank.
        batch_size: Samples of a batch on each rank; `None` delivers items as they are, without collation.
        division: How whole updates are divided over ranks and micro-batches; takes the place of `batch_size`.
        shuffle: Permute the samples anew in each epoch.
        drop_last: Leave out the last global batch if it is not full.
        pad: Give a rank for which nothing is left of the last global batch one sample of weight zero, instead of
            nothing.
        settings: As those of `KeyedLoader`.

    Raises:
        ValueError: If the dataset is empty, or smaller than one global batch while ragged ones are dropped.
    """

    order: PositionedBatchSampler

    def __init__(
        self,
        dataset: object,
        share: Share,
        *,
        batch_size: int | None = 1,
        division: Division | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        pad: bool = False,
        **settings: Any,
    ) -> None:
        if shuffle and isinstance(dataset, OrderedDataset):
            raise ValueError(
                f"Expected no dataloader.shuffle for split {share.split!r}: a {type(dataset).__name__} has its own order. Received: "
                "shuffle=True. Leave it out."
            )
        length = length_of(dataset, f"split {share.split!r}")
        if division is None:
            division = Division.of_batches(batch_size or 1, share.world_size)
        else:
            batch_size = division.micro_batch_size
        order = PositionedBatchSampler(
            length, share, division, shuffle=shuffle, drop_last=drop_last, pad=pad
        )
        _check_not_empty(order)
        batched = batch_size is not None
        super().__init__(
            dataset, order, batch_size=batch_size, batched=batched, drop_last=drop_last, **settings
        )

    def take_length(self) -> None:
        """Take over the length that the dataset has now. Call between two passes."""
        self.order.length = length_of(self.dataset, f"split {self.split!r}")
        _check_not_empty(self.order)
        self.close()  # workers that are kept hold a copy of the dataset

    def tell_epoch(self) -> None:
        """Call `set_epoch` of the dataset, and take over the length that follows where nothing of the pass is read."""
        super().tell_epoch()
        if (
            hasattr(self.dataset, "set_epoch")
            and not self.order.consumed
            and len(self.dataset) != self.order.length
        ):
            self.take_length()

    @property
    def division(self) -> Division | None:
        """How updates are divided; `None` where `accum_steps` says how many batches make one."""
        return self.order.division if self.order.division.is_update else None

    @property
    def held_at_once(self) -> int:
        """The most samples that a rank holds at once of the next update; 0 at the end of the pass."""
        order = self.order
        is_full = order.length - order.consumed >= order.division.samples
        samples = order.division.samples if is_full else order.tail(order.consumed)
        return order.division.largest(samples)

    def limit_micro_batch(self, samples: int) -> None:
        """Cut updates into micro-batches of at most so many samples, from the next iterator on. Call on all ranks."""
        self.order.division = self.order.division.capped(samples)
        self.__dict__.update(batch_size=self.order.division.micro_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what tells whether it fits."""
        state = super().state_dict()
        if isinstance(self.dataset, OrderedDataset):
            state["order"] = self.dataset.fingerprint(self.order.epoch)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. Another batch size, number of workers or world size does not matter.

        Raises:
            ValueError: If the dataset has another length, or the order is another one.
        """
        self._go_to_pass(state)
        self.order.check(state)
        if isinstance(self.dataset, OrderedDataset) and "order" in state:
            self.dataset.check_fingerprint(state["order"], state["epoch"], self.split)
        super().load_state_dict(state)


def _check_not_empty(order: PositionedBatchSampler) -> None:
    division = order.division
    if not order.drop_last or order.length >= division.samples:
        return
    least, key = f"update of {division.samples} samples", "global_batch_size"
    if not division.is_update:
        factors = f"batch_size {division.micro_batch_size} x {order.world_size} ranks"
        least, key = f"global batch of {division.samples} samples ({factors})", "batch_size"
    raise ValueError(
        f"Expected split {order.split!r} to have at least one {least}, since drop_last=True. Received: {order.length} samples. "
        f"Lower dataloader.{key}, or set dataloader.drop_last to False."
    )


# Over an iterable dataset


class StreamLoader(LibraryLoader):
    """A loader over an iterable dataset, with its randomness keyed; see `KeyedStream`. Its state is the place of each worker.

    Workers are made anew for each pass, so that what a pass is does not depend on what they read before.
    """

    def __init__(
        self,
        dataset: object,
        share: Share,
        *,
        keyed: str = "batch",
        batch_size: int | None = 1,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.share, self.keyed = share, keyed
        self.epoch = 0
        if is_stateful(dataset):
            check_savable(dataset, share.split)
        settings.pop("persistent_workers", None)  # each pass has new ones
        if collate_fn in (None, default_collate):
            collate_fn = default_convert if batch_size is None else collate
        self._make: Callable[[Any], Any] = collate_fn
        super().__init__(
            dataset, batch_size=batch_size, drop_last=drop_last, collate_fn=_as_is, **settings
        )
        self._stream: KeyedStream | None = None
        self._states: dict[int, dict[str, Any]] = {}
        self._first = 0
        self._is_loaded = False

    @property
    def is_read_again(self) -> bool:
        """Whether a resumed pass is read from its beginning up to the position, since the dataset keeps no place itself."""
        return not is_stateful(self.dataset) or why_read_again(self.dataset) is not None

    def set_epoch(self, epoch: int) -> None:
        """Prepare a pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the batches of a pass, from the place on that was loaded."""
        # A place counts for one iterator: the next pass begins at the beginning.
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

    def _view(self) -> dict[str, Any]:
        self._stream = KeyedStream(
            self.dataset,
            self.share,
            epoch=self.epoch,
            every=1 if self.keyed == "sample" else self.batch_size or 1,
            make=self._make,
            size=self.batch_size,
            drop_last=self.drop_last,
            states=dict(self._states),
            first=self._first,
        )
        return {"dataset": self._stream, "batch_size": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the place of each worker that has given a batch, and whose turn it is."""
        states = self._states
        if not self.num_workers and self._stream is not None and self._stream.has_begun:
            states = {0: self._stream.place()}
        return {
            "workers": {str(worker): state for worker, state in states.items()},
            "first": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place, from which the next iterator begins."""
        self._states = {int(worker): place for worker, place in state["workers"].items()}
        self._first = state["first"]
        self._is_loaded = True
