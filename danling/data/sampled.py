"""Reads a map-style dataset in the order of a sampler of the user's, with a position that comes back; also for loaders of the user's."""

from __future__ import annotations

import inspect
import operator
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any
from zlib import crc32

from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_collate, default_convert
from torch.utils.data.distributed import DistributedSampler

from .dataset_state import from_plain, is_stateful, to_plain
from .loader import KeyedLoader, StreamLoader
from .randomness import Generators, derive_seed, mix_seed
from .sampler import Batch, BatchKey, Share
from .workers import OF_WORKERS


def of_torchdata(name: str, module: str = "torchdata.stateful_dataloader") -> tuple[Any, ...]:
    """Return a class of torchdata, where a program has loaded that."""
    loaded = sys.modules.get(module)
    return (getattr(loaded, name),) if loaded is not None else ()


def order_of(loader: Any) -> Any:
    """Return the sampler that decides the order of a loader: within a batch sampler, only where that is one of torch or torchdata."""
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(loader, "sampler", None) if batches is None else batches
    known = (BatchSampler, *of_torchdata("BatchSampler", "torchdata.stateful_dataloader.sampler"))
    return sampler.sampler if type(sampler) in known else sampler


def divides_evenly(loader: Any) -> bool:
    """Return whether every rank is known to get as many batches of a loader: those of a user's class may be of any number."""
    return type(order_of(loader)) in (
        DistributedSampler,
        *of_torchdata("StatefulDistributedSampler", "torchdata.stateful_dataloader.sampler"),
    )


class SampledBatches(Sampler[BatchKey]):
    """Keys of the batches of one rank in the order of a sampler, from any position of any pass on.

    A pass begins with `set_epoch` of the sampler, if it has that, and with the global streams and the sampler's generators seeded with
    (seed, "order", split, epoch). A sampler with a length is drawn to its end at once; one without is seeded before each batch of indices.
    On a resume what was consumed is drawn once more, without reading a sample, and compared with a checksum.

    Attributes:
        position: Indices of the pass that are consumed on this rank; lists of them, where the sampler yields lists.
        consumed: Batches of the pass that are consumed on this rank.
    """

    kind = "sampled"
    length_is_known = False

    def __init__(
        self,
        sampler: Any,
        share: Share,
        *,
        batched: bool,
        batch_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.sampler = sampler
        self.batched = batched
        self.batch_size = 1 if batched else batch_size
        """What of the sampler makes a batch: one list, or so many indices."""
        self.drop_last = drop_last and not batched
        self.split, self.seed, self.rank, self.world_size = share
        self.ranks = (self.rank,)
        self.epoch = self.position = self.consumed = 0
        self._digest = 0
        self._ahead: deque[tuple[int, int]] = deque()
        """Position and checksum after each batch whose key was handed out."""
        self._sizes: deque[int] = deque()
        """How many samples each batch has whose key was handed out, and whose data was not."""
        holders = [
            held for held in (sampler, getattr(sampler, "sampler", None)) if held is not None
        ]
        self._take_epoch = [held for held in holders if callable(getattr(held, "set_epoch", None))]
        self._stateful: Any = None if self._take_epoch else next(filter(is_stateful, holders), None)
        """What keeps the state of the sampler; none where the order follows from the epoch."""
        self._found: object = None
        """The state that it had when the pass began."""
        self._drawn: _Drawn | None = None
        """The order of this pass, up to where it was drawn: an iterator that begins there goes on with it."""

    @property
    def length(self) -> int | None:
        """What a pass yields: indices, or lists of them; `None` where the sampler does not say."""
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        """Return the number of batches of a whole pass."""
        return self._count(len(self.sampler))

    def remaining_batches(self) -> int | None:
        """Return the batches from the position to the end of the pass, `None` where the sampler has no length."""
        length = self.length
        return None if length is None else max(self._count(length - self.position), 0)

    def _count(self, length: int) -> int:
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def is_even(self) -> bool:
        """Return whether every rank is known to get the same number of batches."""
        return self.world_size == 1 or divides_evenly(self)

    def batches(self, data: Iterable[Any]) -> Iterator[Batch]:
        """Return the batches of this rank from the position on, with their data."""
        for number, each in enumerate(data, self.consumed):
            read = self._sizes.popleft() if self._sizes else None
            yield Batch(each, None, None, place=(self.rank, number), read=read)

    # Position

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        # The same pass again begins with the state of the sampler that it began with before.
        if epoch != self.epoch:
            self._found = None
        self.epoch = epoch
        self.position = self.consumed = self._digest = 0
        self._drawn = None
        self._ahead.clear()

    def advance(self, batches: int) -> None:
        """Move the position by so many batches."""
        for _ in range(batches):
            self.consumed += 1
            if self._ahead:
                self.position, self._digest = self._ahead.popleft()
            else:
                self.position += self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position, a checksum of the indices up to it, and the state of the sampler."""
        state: dict[str, Any] = {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "position": self.position,
            "digest": self._digest,
            "length": self.length,
            "world_size": self.world_size,
        }
        if self._stateful is not None:
            current = to_plain(self._stateful.state_dict())
            found = current if self._found is None else self._found
            state |= {"sampler": current, "sampler_found": found}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises:
            ValueError: If the sampler has another length.
        """
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._found = state.get("sampler_found")
        self._load_sampler(self._found)
        self._tell_epoch()
        if state["position"] and state["length"] != self.length:
            raise ValueError(
                f"Expected the sampler of split {self.split!r} to have the length {state['length']}, as when its "
                f"position was saved. Received: {type(self.sampler).__name__} of length {self.length}. Restore the "
                "sampler, or exclude 'dataloaders' from loading to restart the epoch."
            )
        # A pass that is over is not begun again, and the next one finds the sampler as this one left it.
        self._load_sampler(state.get("sampler"))
        self.position, self.consumed, self._digest = (
            state["position"],
            state["consumed"],
            state["digest"],
        )

    def _load_sampler(self, state: object) -> None:
        if state is not None and self._stateful is not None:
            self._stateful.load_state_dict(from_plain(state))

    def _tell_epoch(self) -> None:
        for holder in self._take_epoch:
            holder.set_epoch(self.epoch)

    # Order

    def __iter__(self) -> Iterator[BatchKey]:
        """Yield the key of each batch to read, from the position on."""
        drawn = self._drawn
        if drawn is None or drawn.position != self.position:
            drawn = self._drawn = self._begin()
        self._ahead.clear()
        self._sizes.clear()
        while True:
            first = drawn.samples
            chunk = drawn.take(self.batch_size)
            is_dropped = self.drop_last and len(chunk) < self.batch_size
            if is_dropped or not chunk:
                return
            self._ahead.append((drawn.position, drawn.digest))
            indices = list(chunk[0]) if self.batched else chunk
            self._sizes.append(len(indices))
            yield BatchKey(self.epoch, first, indices)

    def _begin(self) -> _Drawn:
        """Draw the order, up to the position."""
        if self._found is not None:
            self._load_sampler(self._found)
        elif self._stateful is not None:
            self._found = to_plain(self._stateful.state_dict())
        self._tell_epoch()
        drawn = _Drawn(self)
        # In the steps of the first time, since a sampler without a length is seeded before each of them.
        while drawn.position < self.position:
            if not drawn.take(min(self.batch_size, self.position - drawn.position)):
                break
        if (drawn.position, drawn.digest) != (self.position, self._digest):
            units = "batches" if self.batched else "indices"
            raise ValueError(
                f"Expected the sampler of split {self.split!r} to give the {self.position} "
                f"{units} of epoch {self.epoch} again that were consumed when the run "
                f"was saved. Received: others from {type(self.sampler).__name__}. Define set_epoch(epoch) on it, which its order follows "
                "from, or state_dict and load_state_dict for what it changes; and let it draw from the global streams or from a generator "
                "that is its attribute. Or exclude 'dataloaders' from loading to restart the epoch."
            )
        return drawn


class _Drawn:
    """The items of one pass as the sampler gives them.

    Attributes:
        position: Items that were taken.
        samples: Indices in them.
        digest: Checksum of these indices.
    """

    def __init__(self, batches: SampledBatches) -> None:
        self.position = self.samples = self.digest = 0
        self._batches, self._length = batches, batches.length
        self._chunks = 0
        sampler = batches.sampler
        # Of a sampler that draws an order for one rank; one of which each rank takes a part draws alike on all.
        draws_apart = type(order_of(batches)) in (
            RandomSampler,
            WeightedRandomSampler,
            SubsetRandomSampler,
        )
        apart = (batches.rank,) if draws_apart else ()
        self._order_seed = derive_seed(batches.seed, "order", batches.split, batches.epoch, *apart)
        self._generators = Generators({"sampler": sampler})
        self._items = self._begin()
        if self._generators.look():  # what drawing has made is seeded too
            self._items = self._begin()
            self._generators.look()

    def _begin(self) -> Iterator[Any]:
        self._generators.seed(self._order_seed)
        items = iter(self._batches.sampler)
        # What is left follows, since a sampler may yield more than its length says.
        return items if self._length is None else chain(list(islice(items, self._length)), items)

    def take(self, number: int) -> list[Any]:
        """Return the next items, those of a batch; fewer where the pass ends."""
        if self._length is None or self.position + number > self._length:
            self._generators.seed(mix_seed(self._order_seed, self._chunks))
        items = list(islice(self._items, number))
        self._chunks += 1
        self.position += len(items)
        lists = items if self._batches.batched else [items]
        for indices in lists:
            self.samples += len(indices)
            self.digest = crc32(array("Q", map(_word, indices)).tobytes(), self.digest)
        return items


def _word(index: Any) -> int:
    """Return 64 bits of what a sampler names a sample by."""
    try:
        return operator.index(index) & 0xFFFFFFFFFFFFFFFF
    except TypeError:
        return derive_seed(repr(index))


def sampled_loader(
    dataset: object,
    share: Share,
    *,
    sampler: object = None,
    batch_sampler: object = None,
    batch_size: int | None = 1,
    drop_last: bool = False,
    **settings: Any,
) -> KeyedLoader:
    """Return a loader whose order is that of a sampler, which is not divided over ranks: that is its own business."""
    given, lists = (sampler, False) if batch_sampler is None else (batch_sampler, True)
    order = SampledBatches(
        given, share, batched=lists, batch_size=batch_size or 1, drop_last=drop_last
    )
    batched = lists or batch_size is not None
    return KeyedLoader(
        dataset, order, batch_size=batch_size, batched=batched, drop_last=drop_last, **settings
    )


# In the place of a loader of the user's

TAKEN = frozenset(inspect.signature(TorchDataLoader.__init__).parameters) - {
    *(
        "self",
        "dataset",
        "batch_size",
        "shuffle",
        "sampler",
        "batch_sampler",
        "drop_last",
        "collate_fn",
        "generator",
    )
}
"""Settings that a loader of the library takes over from one of the user's."""


def is_plain_loader(loader: Any) -> bool:
    """Return whether a loader is one of torch or torchdata, no subclass, that gives its batches in order."""
    if type(loader) not in (TorchDataLoader, *of_torchdata("StatefulDataLoader")):
        return False
    return bool(getattr(loader, "in_order", True)) or not loader.num_workers


def taken_from(loader: Any) -> dict[str, Any]:
    """Return the settings of a user's loader that one of the library takes over."""
    # A loader whose `num_workers` was set to 0 after it was made still has those of workers.
    unused = () if loader.num_workers else OF_WORKERS
    names = [name for name in TAKEN if name not in unused and hasattr(loader, name)]
    return {name: getattr(loader, name) for name in names}


def as_keyed_loader(loader: Any, share: Share) -> Any:
    """Return a loader that reads what a loader of the user's does, in the order of its sampler, with randomness keyed.

    The user's own is not touched: its dataset, samplers and functions are used as they are. It is returned itself where nothing is known
    of its order.
    """
    if not is_plain_loader(loader) or isinstance(loader.dataset, IterDataPipe):
        return loader
    settings = taken_from(loader)
    shown = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset):
        return StreamLoader(
            loader.dataset, share, collate_fn=loader.collate_fn, **shown, **settings
        )
    # Without the usual ones, which draw nothing: a `collate_fn` in the settings is seeded.
    if loader.collate_fn not in (default_collate, default_convert):
        settings["collate_fn"] = loader.collate_fn
    if loader.batch_sampler is None:
        settings |= {"sampler": loader.sampler, "batch_size": None}
    else:
        settings |= {"batch_sampler": loader.batch_sampler}
    twin = sampled_loader(loader.dataset, share, **settings)
    # For programs that ask for them. By `__dict__`, since torch refuses to set them later.
    twin.__dict__.update(shown)
    return twin
