"""Batches in the order of a sampler of the user's, with a position that comes back."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from zlib import crc32

import torchdata.stateful_dataloader.sampler as torchdata_samplers
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from .host_streams import HOST_STREAMS
from .keyed import Family, Key, index_number
from .randomness import derive_seed, seed_host_streams
from .sampler_state import SamplerState

logger = logging.getLogger("danling")

_OWN_ORDER = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
"""Samplers that draw an order for one rank, never one of which each rank takes a part."""
_KNOWN = (*_OWN_ORDER, SequentialSampler, DistributedSampler, torchdata_samplers.RandomSampler)
"""Samplers that give the same indices however far ahead they are asked for them."""
_AHEAD = 4096


class SampledBatches(Sampler[list[Key]]):
    """Batches of keys (epoch, index) of one rank in the order of a sampler, from any position of any pass on.

    The sampler is asked inside random streams of its own, seeded by (seed, split, epoch), and its generators and the attributes that it
    changes are put back to how the pass found them: so it gives the pass again when the run is resumed. What was
    consumed is drawn once more, without reading a sample, and compared with a check sum.

    A sample that is drawn again within a pass gets randomness of its own: its key is ((epoch, n), index) at the n-th
    repetition. So it does on each of several ranks, which may draw the same sample.

    Args:
        sampler: Anything that yields indices, or lists of them.
        batched: It yields lists.
        dataset: What it draws from.
        batch_size: Indices of a batch, where it yields single ones.
        drop_last: Leave out a last batch that is not full.
        seed: Base seed.
        split: Name of the split.
        rank: Coordinate of this process in the data domain.
        world_size: Size of the data domain.
    """

    def __init__(
        self,
        sampler: Any,
        *,
        batched: bool,
        dataset: object,
        batch_size: int = 1,
        drop_last: bool = False,
        seed: int = 0,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.sampler = sampler
        self.batched = batched
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self.split = split
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.consumed = 0
        """Indices of the pass that are consumed on this rank; lists of them, where the sampler yields lists."""
        self.batches = 0
        """Batches of the pass that are consumed on this rank."""
        self._digest = 0
        self._ahead: deque[tuple[int, int]] = deque()
        self._state = SamplerState(sampler, dataset)
        self._found: Mapping[str, Any] | None = None
        self._order: _Order | None = None
        self._warned = False

    # Lengths

    @property
    def length(self) -> int | None:
        """What a pass yields: indices, or lists of them; `None` where the sampler does not say."""
        try:
            return len(self.sampler)
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        """Return the number of batches of a whole pass.

        Raises:
            TypeError: If the sampler has no length.
        """
        return self._num_batches(len(self.sampler))

    def remaining(self) -> int | None:
        """Return the batches from the position to the end of the pass, `None` where the sampler has no length."""
        length = self.length
        return None if length is None else max(self._num_batches(length - self.consumed), 0)

    def _num_batches(self, length: int) -> int:
        if self.batched:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    # Position

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        if epoch != self.epoch:
            self._found = None
        self.epoch = epoch
        self.consumed = self.batches = self._digest = 0
        self._order = None
        self._ahead.clear()

    def advance(self, batches: int) -> None:
        """Move the position by so many batches that were given."""
        for _ in range(batches):
            self.batches += 1
            if self._ahead:
                self.consumed, self._digest = self._ahead.popleft()
            else:
                self.consumed += 1 if self.batched else self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the position, how the pass found the sampler, and how the sampler is now."""
        current = self._state.capture()
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.batches,
            "position": self.consumed,
            "digest": self._digest,
            "length": self.length,
            "world_size": self.world_size,
            "sampler": current,
            "sampler_found": current if self._found is None else self._found,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises:
            ValueError: If the sampler has another length.
        """
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self._found = dict(state["sampler_found"])
        self._state.restore(self._found)
        self._tell_epoch()
        if state["position"] and state["length"] != self.length:
            raise ValueError(
                f"Expected the sampler of split {self.split!r} to have the length {state['length']}, as when its "
                f"position was saved. Received: {type(self.sampler).__name__} of length {self.length}. Restore the "
                "sampler, or exclude 'dataloaders' from loading to start the epoch anew."
            )
        # A pass that is over is not begun again, and the next one finds the sampler as this one left it.
        self._state.restore(state["sampler"])
        self.consumed, self.batches, self._digest = state["position"], state["consumed"], state["digest"]

    # Order

    def __iter__(self) -> Iterator[list[Key]]:
        order = self._order
        if order is None or order.position != self.consumed:
            order = self._order = self._begin()
        self._ahead.clear()
        digest, size = self._digest, 1 if self.batched else self.batch_size
        while chunk := order.take(size):
            if not self.batched and self.drop_last and len(chunk) < size:
                return
            indices = chunk[0] if self.batched else chunk
            digest = order.digest
            self._ahead.append((order.position, digest))
            yield order.keys(indices)

    def _begin(self) -> _Order:
        if self._found is None:
            self._found = self._state.capture()
            self._name_opaque()
        else:
            self._state.restore(self._found)
        self._tell_epoch()
        order = _Order(self)
        while order.position < self.consumed and (chunk := order.take(min(_AHEAD, self.consumed - order.position))):
            for indices in chunk if self.batched else [chunk]:
                order.keys(indices)
        if (order.position, order.digest) != (self.consumed, self._digest):
            raise ValueError(
                f"Expected the sampler of split {self.split!r} to give the {self.consumed} "
                f"{'batches' if self.batched else 'indices'} of epoch {self.epoch} again that were consumed when the run "
                f"was saved. Received: others from {type(self.sampler).__name__}. Let it draw from the global streams, "
                "from a generator that it holds as an attribute, or from its epoch alone; or exclude 'dataloaders' from "
                "loading to start the epoch anew."
            )
        return order

    def _tell_epoch(self) -> None:
        for holder in (self.sampler, getattr(self.sampler, "sampler", None)):
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)

    def _name_opaque(self) -> None:
        changed = self._state.opaque_changes() if not self._warned else []
        if changed:
            self._warned = True
            logger.warning(
                "The sampler of split %r (%s) changes %s, which cannot be saved: a resumed run may draw another order. "
                "Keep numbers, lists, tensors or generators there.",
                self.split,
                type(self.sampler).__name__,
                ", ".join(changed),
            )

    @property
    def order_seed(self) -> int:
        """Seed of the streams inside which the sampler draws this pass."""
        inner = self.sampler.sampler if type(self.sampler) in _BATCH_SAMPLERS else self.sampler
        apart = (self.rank,) if type(inner) in _OWN_ORDER else ()
        return derive_seed(self.seed, "pass", self.split, self.epoch, *apart)

    @property
    def looks_ahead(self) -> int:
        """How many items may be drawn at once."""
        if type(self.sampler) in _BATCH_SAMPLERS:
            return _AHEAD // 64 if type(self.sampler.sampler) in _KNOWN else 1
        return _AHEAD if type(self.sampler) in _KNOWN or isinstance(self.sampler, (list, tuple, range)) else 1


_BATCH_SAMPLERS = (BatchSampler, torchdata_samplers.BatchSampler)


def yields_batches(sampler: Any, dataset: object) -> bool:
    """Return whether a sampler yields lists of indices, the batches, and not single ones.

    A class of the user's own is asked for its first item inside streams of its own, and put back to how it was.

    Args:
        sampler: Anything that yields indices, or lists of them.
        dataset: What it draws from.
    """
    if isinstance(sampler, _BATCH_SAMPLERS):
        return True
    if type(sampler) in _KNOWN or hasattr(sampler, "__next__"):
        return False
    state, streams = SamplerState(sampler, dataset), HOST_STREAMS.save()
    found = state.capture()
    try:
        return isinstance(next(iter(sampler), None), (list, tuple))
    finally:
        state.restore(found)
        HOST_STREAMS.put_back(streams)


class _Order:
    """The items of one pass as the sampler gives them, drawn inside streams of their own."""

    def __init__(self, plan: SampledBatches) -> None:
        self.position = 0
        self.digest = 0
        self._plan = plan
        self._epoch = plan.epoch
        self._streams: Any = None
        self._iterator: Iterator[Any] | None = None
        self._drawn: deque[Any] = deque()
        self._seen: dict[int, int] = {}

    def take(self, number: int) -> list[Any]:
        """Return the next items, fewer where the pass ends."""
        if len(self._drawn) < number:
            self._draw(max(number - len(self._drawn), self._plan.looks_ahead))
        items = [self._drawn.popleft() for _ in range(min(number, len(self._drawn)))]
        self.position += len(items)
        for indices in items if self._plan.batched else [items]:
            self.digest = crc32(array("Q", [_word(index) for index in indices]).tobytes(), self.digest)
        return items

    def _draw(self, number: int) -> None:
        outside = HOST_STREAMS.save()
        try:
            if self._streams is None:
                seed_host_streams(self._plan.order_seed)
            else:
                HOST_STREAMS.put_back(self._streams)
            if self._iterator is None:
                self._iterator = iter(self._plan.sampler)
            self._drawn.extend(islice(self._iterator, number))
            self._streams = HOST_STREAMS.save()
        finally:
            HOST_STREAMS.put_back(outside)

    def keys(self, indices: Any) -> list[Key]:
        """Return the keys of the next batch."""
        return [(self._family(index), index) for index in indices]

    def _family(self, index: object) -> Family:
        number = index_number(index)
        repetition = self._seen.get(number, 0)
        self._seen[number] = repetition + 1
        salt = repetition * self._plan.world_size + self._plan.rank
        return (self._epoch, salt) if salt else self._epoch


def _word(index: object) -> int:
    return index_number(index) & 0xFFFFFFFFFFFFFFFF
