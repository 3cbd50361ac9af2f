"""Reads a map-style dataset in the order of a sampler of the user's, with a position that comes back."""

from __future__ import annotations

import copy
import inspect
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any
from zlib import crc32

from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_collate, default_convert

from .dataset_state import from_plain, is_stateful, to_plain
from .generators import Generators
from .keyed import BatchKey, KeyedLoader, index_number
from .randomness import derive_seed, mix_seed, seed_host_streams

_OWN_ORDER = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
"""Samplers that draw an order for one rank, never one of which each rank takes a part."""


def _of_torchdata(name: str, module: str = "torchdata.stateful_dataloader") -> tuple[Any, ...]:
    """Return a class of torchdata, where a program has loaded that."""
    loaded = sys.modules.get(module)
    return (getattr(loaded, name),) if loaded is not None else ()


def is_of_torchdata(loader: object) -> bool:
    """Return whether a loader is a `StatefulDataLoader`, or of a subclass."""
    return isinstance(loader, _of_torchdata("StatefulDataLoader"))


class SampledBatches(Sampler[BatchKey]):
    """Keys of the batches of one rank in the order of a sampler, from any position of any pass on.

    A pass begins with `set_epoch` of the sampler, if it has that, and with the global streams and the sampler's generators seeded with
    (seed, "order", split, epoch). A sampler with a length is drawn to its end at once; one without is seeded before each batch of indices.
    On a resume what was consumed is drawn once more, without reading a sample, and compared with a checksum.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        batched: bool,
        batch_size: int = 1,
        drop_last: bool = False,
        seed: int = 0,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.sampler = sampler
        self.batched = batched
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.split = split
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0
        """Indices of the pass that are consumed on this rank; lists of them, where the sampler yields lists."""
        self.consumed = 0
        """Batches of the pass that are consumed on this rank."""
        self._digest = 0
        self._ahead: deque[tuple[int, int]] = deque()
        self._found: object = None
        """The state that a sampler with one had when the pass began."""
        self._order: _Order | None = None

    @property
    def length(self) -> int | None:
        """What a pass yields: indices, or lists of them; `None` where the sampler does not say."""
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        """Return the number of batches of a whole pass."""
        return self._num_batches(len(self.sampler))

    def remaining(self) -> int | None:
        """Return the batches from the position to the end of the pass, `None` where the sampler has no length."""
        length = self.length
        return None if length is None else max(self._num_batches(length - self.position), 0)

    def _num_batches(self, length: int) -> int:
        if self.batched:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    # Position

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._found = None
        self.epoch = epoch
        self.position = self.consumed = self._digest = 0
        self._order = None
        self._ahead.clear()

    def advance(self, batches: int) -> None:
        for _ in range(batches):
            self.consumed += 1
            if self._ahead:
                self.position, self._digest = self._ahead.popleft()
            else:
                self.position += 1 if self.batched else self.batch_size

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "position": self.position,
        }
        state |= {"digest": self._digest, "length": self.length, "world_size": self.world_size}
        held = _stateful(self.sampler)
        if held is None:
            return state
        current = to_plain(held.state_dict())
        return {**state, "sampler": current, "sampler_found": current if self._found is None else self._found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._found = state.get("sampler_found")
        self._load_sampler(self._found)
        self._tell_epoch()
        if state["position"] and state["length"] != self.length:
            raise ValueError(
                f"Expected the sampler of split {self.split!r} to have the length {state['length']}, as when its "
                f"position was saved. Received: {type(self.sampler).__name__} of length {self.length}. Restore the "
                "sampler, or exclude 'dataloaders' from loading to start the epoch anew."
            )
        # A pass that is over is not begun again, and the next one finds the sampler as this one left it.
        self._load_sampler(state.get("sampler"))
        self.position, self.consumed, self._digest = state["position"], state["consumed"], state["digest"]

    def _load_sampler(self, state: object) -> None:
        held = _stateful(self.sampler)
        if state is not None and held is not None:
            held.load_state_dict(from_plain(state))

    # Order

    def __iter__(self) -> Iterator[BatchKey]:
        return self.keys()

    def keys(self) -> Iterator[BatchKey]:
        """Yield the key of each batch to read, from the position on."""
        order = self._order
        if order is None or order.position != self.position:
            order = self._order = self._begin()
        self._ahead.clear()
        size = 1 if self.batched else self.batch_size
        while True:
            first = order.samples
            chunk = order.take(size)
            if not chunk or (not self.batched and self.drop_last and len(chunk) < size):
                return
            self._ahead.append((order.position, order.digest))
            yield BatchKey(self.epoch, first, list(chunk[0]) if self.batched else chunk)

    def _begin(self) -> _Order:
        if self._found is not None:
            self._load_sampler(self._found)
        elif (held := _stateful(self.sampler)) is not None:
            self._found = to_plain(held.state_dict())
        self._tell_epoch()
        order = _Order(self)
        size = 1 if self.batched else self.batch_size
        while order.position < self.position and order.take(min(size, self.position - order.position)):
            pass
        if (order.position, order.digest) != (self.position, self._digest):
            raise ValueError(
                f"Expected the sampler of split {self.split!r} to give the {self.position} "
                f"{'batches' if self.batched else 'indices'} of epoch {self.epoch} again that were consumed when the run "
                f"was saved. Received: others from {type(self.sampler).__name__}. Define set_epoch(epoch) on it, which its order follows "
                "from, or state_dict and load_state_dict for what it changes; and let it draw from the global streams or from a generator "
                "that it holds as an attribute. Or exclude 'dataloaders' from loading to start the epoch anew."
            )
        return order

    def _tell_epoch(self) -> None:
        for holder in _holders(self.sampler):
            if callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(self.epoch)

    @property
    def order_seed(self) -> int:
        """Seed of the order of this pass."""
        batches = (BatchSampler, *_of_torchdata("BatchSampler", "torchdata.stateful_dataloader.sampler"))
        inner = self.sampler.sampler if type(self.sampler) in batches else self.sampler
        apart = (self.rank,) if type(inner) in _OWN_ORDER else ()
        return derive_seed(self.seed, "order", self.split, self.epoch, *apart)


def yields_batches(sampler: Any) -> bool:
    """Return whether a sampler yields lists of indices, the batches, and not single ones. A class of the user's own is asked for one."""
    if isinstance(sampler, BatchSampler):
        return True
    if hasattr(sampler, "__next__"):
        return False
    return isinstance(next(iter(copy.copy(sampler)), None), (list, tuple))


def _holders(sampler: object) -> list[Any]:
    return [held for held in (sampler, getattr(sampler, "sampler", None)) if held is not None]


def _stateful(sampler: object) -> Any:
    """Return what keeps the state of a sampler, itself or what it makes batches of; `None` where the order follows from the epoch."""
    holders = _holders(sampler)
    if any(callable(getattr(held, "set_epoch", None)) for held in holders):
        return None
    return next((held for held in holders if is_stateful(held)), None)


class _Order:
    """The items of one pass as the sampler gives them."""

    def __init__(self, plan: SampledBatches) -> None:
        self.position = self.samples = self.digest = 0
        self._plan = plan
        self._seed, self._chunks = plan.order_seed, 0
        self._length = plan.length
        self._generators = Generators({"sampler": plan.sampler})
        self._items: Iterator[Any] = self._begun()
        if self._generators.look():  # what drawing has made is seeded too
            self._items = self._begun()
            self._generators.look()

    def _begun(self) -> Iterator[Any]:
        self._seed_all(self._seed)
        items = iter(self._plan.sampler)
        return items if self._length is None else chain(list(islice(items, self._length)), items)

    def _seed_all(self, seed: int) -> None:
        self._generators.seed(seed)
        seed_host_streams(seed)

    def take(self, number: int) -> list[Any]:
        """Return the next items, those of a batch; fewer where the pass ends."""
        if self._length is not None and self.position + number <= self._length:
            items = list(islice(self._items, number))
        else:
            self._seed_all(mix_seed(self._seed, self._chunks))
            items = list(islice(self._items, number))
        self._chunks += 1
        self.position += len(items)
        for indices in items if self._plan.batched else [items]:
            self.samples += len(indices)
            self.digest = crc32(array("Q", [_word(index) for index in indices]).tobytes(), self.digest)
        return items


def _word(index: object) -> int:
    return index_number(index) & 0xFFFFFFFFFFFFFFFF


class SampledLoader(KeyedLoader):
    """A loader whose order is that of a sampler, and whose position and randomness come back exactly.

    The sampler is not divided over ranks: that is its own business.
    """

    order: SampledBatches

    def __init__(
        self,
        dataset: object,
        *,
        sampler: object = None,
        batch_sampler: object = None,
        batch_size: int | None = 1,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: str = "train",
        **settings: Any,
    ) -> None:
        batched = batch_sampler is not None
        order = SampledBatches(
            batch_sampler if batched else sampler,
            batched=batched,
            batch_size=batch_size or 1,
            drop_last=drop_last,
            seed=seed,
            split=split,
            rank=rank,
            world_size=world_size,
        )
        batched = batched or batch_size is not None
        super().__init__(
            dataset,
            order,
            batch_size=batch_size,
            drop_last=drop_last,
            split=split,
            batched=batched,
            ranks=(rank,),
            **settings,
        )

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def advance(self, batches: int) -> None:
        self.order.advance(batches)

    def state_dict(self) -> dict[str, Any]:
        return {**self.order.state_dict(), **self.held_state()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        if state_dict["seed"] != self.seed:
            # Workers that are kept hold a copy of the old seed.
            self.close()
        self.order.load_state_dict(state_dict)
        self.load_held_state(state_dict)


TAKEN = frozenset(inspect.signature(TorchDataLoader.__init__).parameters) - {
    *("self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator")
}
"""Settings that a loader of the library takes over from one of the user's."""


def is_plain_loader(loader: Any) -> bool:
    """Return whether a loader is one of torch or torchdata, no subclass, that gives its batches in order."""
    if type(loader) not in (TorchDataLoader, *_of_torchdata("StatefulDataLoader")):
        return False
    return bool(getattr(loader, "in_order", True)) or not loader.num_workers


def taken_settings(loader: Any, *more: str) -> dict[str, Any]:
    """Return the settings of a user's loader that one of the library is made with."""
    settings = {name: getattr(loader, name) for name in (*TAKEN, *more) if hasattr(loader, name)}
    unused = () if loader.num_workers else ("prefetch_factor", "timeout")
    return {name: value for name, value in settings.items() if name not in unused}


def keyed_twin(loader: Any, **place: Any) -> KeyedLoader | None:
    """Return a loader that reads what a loader of the user's does, in the order of its sampler, with randomness keyed.

    The user's own is not touched: its dataset, samplers and functions are used as they are.
    """
    if not is_plain_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    settings = taken_settings(loader)
    if loader.collate_fn not in (default_collate, default_convert):
        settings["collate_fn"] = loader.collate_fn
    batched = loader.batch_sampler is not None
    twin = SampledLoader(
        loader.dataset,
        **{"batch_sampler" if batched else "sampler": loader.batch_sampler if batched else loader.sampler},
        batch_size=1 if batched else None,
        **place,
        **settings,
    )
    twin.__dict__.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    return twin
