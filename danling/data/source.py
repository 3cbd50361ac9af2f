"""A common interface to every kind of loader: its batches, and the position in them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cursors import Batch, Cursor, PositionCursor
from .live_cursors import CountedCursor, StatefulCursor
from .loader import DataLoader
from .sampled_cursor import SampledCursor
from .sampled_loader import SampledLoader, can_be_keyed, keyed_twin
from .stream_loader import is_stream, stream_twin
from .user_loader import describe, describe_dataset
from .windows import ReaderPlace, WindowCursor, WindowLoader

logger = logging.getLogger("danling")


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
        read = loader
        if place is not None and isinstance(loader, WindowLoader):
            loader.take_place(place)
        if seed is not None and can_be_keyed(loader):
            read = keyed_twin(loader, split=split, seed=seed, rank=rank, world_size=world_size)
        elif seed is not None and is_stream(loader):
            read = stream_twin(loader, split=split, seed=seed, rank=rank)
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
        held = describe_dataset(self.loader)
        return describe(batch.data) if held is None else held

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
