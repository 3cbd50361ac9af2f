"""A common interface to every kind of loader: its batches, and the position in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler

from .cursors import Batch, CountedCursor, Cursor, PositionCursor, SampledCursor, StatefulCursor
from .dataset_state import get_states, is_stateful, set_states, stateful_parts
from .loader import DataLoader
from .sampled import SampledLoader, keyed_twin
from .stream_loader import stream_twin
from .windows import ReaderPlace, WindowCursor, WindowLoader

logger = logging.getLogger("danling")

_VALUES = 64
"""How many values of a tensor or a list are looked at."""


def _nothing() -> None:
    """Raise where the data was changed within a pass: it was not."""


class BatchSource:
    """Batches of a loader, and the position up to which they are consumed.

    The position depends on the kind of the loader, which is never changed:

    - a loader of the library: three integers, valid for any number of workers and ranks, and nothing is read twice;
    - a loader over a map-style dataset in the order of a sampler: what the sampler was like when it began the pass, and
      how far it got; one state per rank. A `DataLoader` or `StatefulDataLoader` of the user's is wrapped in this kind;
    - a loader with `state_dict` and `load_state_dict`: its own state; one per rank;
    - a `WindowLoader`, such as that of a stream: samples consumed of the one order that all ranks share;
    - any other iterable: the number of batches consumed, which are read again and dropped when the run is resumed.

    Prefetched batches do not count: the position moves when `commit` is called.

    Args:
        loader: Any iterable of batches.
        split: Name of the split.
        rank: Coordinate of this process in the data domain.
        world_size: Size of the data domain.
        seed: Base seed, from which the order of a user's loader is seeded at each pass; `None` leaves it to the
            streams.
        place: What a `WindowLoader` is told; `None` leaves it as it is.

    Raises:
        ValueError: If `loader` cannot be iterated.
    """

    check: Callable[[], None] = staticmethod(_nothing)
    """Called before the position moves; raises where the data was changed within a pass."""
    reads: bool = True
    """Whether batches are read on this rank."""

    def __init__(
        self,
        loader: Any,
        *,
        split: str,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
        place: ReaderPlace | None = None,
    ) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise ValueError(
                f"Expected the loader of split {split!r} to be iterable. Received: loader={loader!r} "
                f"({type(loader).__name__}). Pass a DataLoader, or put a dataset into `datasets`."
            )
        self.loader = loader
        self.split = split
        if place is not None and isinstance(loader, WindowLoader):
            loader.take_place(place)
        read = loader
        if seed is not None:
            twin: Any = keyed_twin(loader, split=split, seed=seed, rank=rank, world_size=world_size)
            if twin is None:
                twin = stream_twin(loader, split=split, seed=seed, rank=rank)
            read = loader if twin is None else twin
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True) and rank == 0:
            logger.warning(
                "The loader of split %r has in_order=False: batches come as workers finish, and a resumed run trains on them "
                "in another order. Leave it out.",
                split,
            )
        self._cursor = _choose_cursor(read)(read, split=split, rank=rank, world_size=world_size, seed=seed)

    def described(self, batch: Batch) -> object:
        """Return a fingerprint by which ranks that read identical data are found: what the dataset holds, else the batch.

        Args:
            batch: The first one of a pass.
        """
        held = _describe_dataset(self.loader)
        return _describe(batch.data) if held is None else held

    @property
    def kind(self) -> str:
        """How the loader is positioned: `"position"`, `"sampled"`, `"window"`, `"stateful"` or `"counted"`."""
        return self._cursor.kind

    @property
    def is_rank_local(self) -> bool:
        """Whether each rank has a state of its own to save."""
        return self._cursor.is_rank_local

    @property
    def epoch(self) -> int:
        """The pass that the position is in, from 0."""
        return self._cursor.epoch

    @property
    def consumed(self) -> int:
        """How much of the pass is consumed: samples over all ranks for a loader of the library, batches of this rank for any other."""
        return self._cursor.consumed

    @property
    def even(self) -> bool:
        """Whether every rank is known to get the same number of batches."""
        return self._cursor.even

    @property
    def foreseen(self) -> bool:
        """Whether a rank that reads nothing knows the batches, and the end of a pass, as those do that read."""
        return self._cursor.foreseen

    @property
    def num_batches(self) -> int | None:
        """Batches of a whole pass on this rank, `None` if unknown."""
        return self._cursor.num_batches()

    def remaining_batches(self) -> int | None:
        """Return the batches from the position to the end of the pass on this rank, `None` if unknown."""
        return self._cursor.remaining_batches()

    def batches(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the pass, from the position on.

        `set_epoch` of the loader, its samplers and its dataset is called first. Nothing is fetched ahead of what is
        asked for, besides what workers prefetch.
        """
        return self._cursor.batches()

    def commit(self, batches: Sequence[Batch]) -> None:
        """Move the position: an update, committed or skipped, consumed these batches.

        Args:
            batches: The next batches that `batches()` gave, padding included. Only their number is read.
        """
        self.check()
        self._cursor.commit(len(batches))

    def commit_state(self, state: Mapping[str, object]) -> None:
        """Let the loader free what lies before a position that is in a checkpoint on the disk, where it frees anything.

        May be called on one rank, and from another thread.

        Args:
            state: What `state_dict` returned.
        """
        if state.get("kind") == self.kind:
            self._cursor.commit_state({key: value for key, value in state.items() if key != "kind"})

    def free(self) -> None:
        """Let the loader free now what is due; called in the thread that reads. May be called on one rank."""
        self._cursor.free()

    def metrics(self) -> dict[str, float]:
        """Return what is shown of the loader beside the metrics of an update. May be called on one rank."""
        return self._cursor.metrics()

    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are; empty where nobody does. May be called on one rank."""
        return self._cursor.standing()

    @property
    def can_restart(self) -> bool:
        """Whether a pass can be begun, left and begun anew with the same batches.

        An iterator, and a loader over one, give each batch once; and a loader with a state of its own that torch does not know keeps its
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

    def finish_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self._cursor.finish_pass()

    def rewind(self) -> None:
        """Go to the beginning of this pass."""
        self._cursor.set_epoch(self._cursor.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of pass `epoch`."""
        self._cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position, as tensors and plain values. Take it between updates."""
        return {"kind": self.kind, **self._cursor.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position.

        Args:
            state: What `state_dict` returned; of this rank, where `is_rank_local`.

        Raises:
            ValueError: If it was saved by another kind of loader, or does not fit this one.
        """
        kind = state.get("kind")
        if kind != self.kind:
            raise ValueError(
                f"Expected a state of kind {self.kind!r} for split {self.split!r}, whose loader is a "
                f"{type(self.loader).__name__}. Received: kind={kind!r}, saved by another kind of loader. Restore the "
                "loader, or exclude 'dataloaders' from loading to start the epoch anew."
            )
        self._cursor.load_state_dict({key: value for key, value in state.items() if key != "kind"})

    def close(self) -> None:
        """End the loader's worker processes."""
        self._cursor.close()


def _choose_cursor(loader: Any) -> type[Cursor]:
    if isinstance(loader, DataLoader):
        return PositionCursor
    if isinstance(loader, SampledLoader):
        return SampledCursor
    if isinstance(loader, WindowLoader):
        return WindowCursor
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        return StatefulCursor
    return CountedCursor


def _describe_dataset(loader: object) -> object:
    """Return what a dataset holds, as far as it can be told without reading it, where the loader reads all of it; else `None`."""
    if not isinstance(loader, TorchDataLoader) or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return None
    return _describe(loader.dataset, depth=4)


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


class Placeholder:
    """Takes the place of the data of a batch."""

    def __repr__(self) -> str:
        return "PLACEHOLDER"


PLACEHOLDER = Placeholder()
"""The data of a batch that this rank does not read."""


class ProxySource(BatchSource):
    """A source for a rank that reads no data: it yields placeholders, and its position follows that of the ranks that read.

    For a loader of the library, or of windows, the number of batches is known. The end of a user's loader is known only to the ranks that
    read it, so the proxy never ends by itself: the ranks have to agree on the end.
    """

    reads = False

    @property
    def even(self) -> bool:
        """Whether the number of batches is known here."""
        return self._cursor.foreseen and self._cursor.even

    def batches(self) -> Iterator[Batch]:
        """Return placeholders from the position on."""
        return self._cursor.unread(PLACEHOLDER)

    def commit(self, batches: Sequence[Batch]) -> None:
        """Move the position as the ranks do that read."""
        self._cursor.commit(len(batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; the state of the loader itself is for the ranks that read it."""
        if self._cursor.foreseen:
            super().load_state_dict(state)
            return
        self._cursor.set_epoch(int(state["epoch"]))
        self._cursor.commit(int(state["consumed"]))
