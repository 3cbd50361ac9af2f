"""Where a pass over a loader is: what every kind of position offers, and that of the library's own loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

from .loader import DataLoader
from .workers import shut_down_workers


class Batch(NamedTuple):
    """One batch as a loader delivered it.

    Attributes:
        data: What the loader delivered.
        samples: Real samples on this rank, 0 for padding, `None` where only the data could tell.
        total: Real samples over all ranks, `None` where it is not known.
        closes: Whether it is the last one of its update, `None` where `accum_steps` says so.
        place: Where it is in the pass, which random numbers are keyed by: the position of its first sample in an order that all ranks
            share, else the rank and the number of the batch. Equal on ranks of one data coordinate, and after a resume.
    """

    data: Any
    samples: int | None
    total: int | None
    closes: bool | None = None
    place: tuple[int, ...] = ()


class Cursor(ABC):
    """The position in a loader. See `BatchSource`, which hands everything on to one of these.

    Args:
        loader: The loader.
        split: Name of the split, for messages and seeds.
        rank: Coordinate of this process in the data domain.
        world_size: Size of the data domain.
        seed: Base seed, `None` leaves the order of a user's loader to the streams.
    """

    kind: str
    is_rank_local: bool
    foreseen: bool = False
    """Whether a rank that reads nothing knows the batches, and the end of a pass, as those do that read."""

    def __init__(self, loader: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        self.loader = loader
        self.split = split
        self.rank = rank
        self.world_size = world_size
        self.seed = seed

    epoch: int
    consumed: int

    @property
    @abstractmethod
    def even(self) -> bool:
        """Whether every rank is known to get the same number of batches."""

    @abstractmethod
    def num_batches(self) -> int | None:
        """Return the batches of a whole pass on this rank, `None` if unknown."""

    @abstractmethod
    def remaining_batches(self) -> int | None:
        """Return the batches from the position on, `None` if unknown."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Return the batches from the position on."""

    def unread(self, data: object) -> Iterator[Batch]:
        """Yield batches from the position on for a rank that reads nothing, with `data` in the place of theirs; without end, where it is
        not known here.

        Args:
            data: What stands in the place of the data.
        """
        return (Batch(data, None, None, place=(self.rank, number)) for number in count(self.consumed))

    @abstractmethod
    def commit(self, batches: int) -> None:
        """Move the position by so many batches."""

    def commit_state(self, state: Mapping[str, object]) -> None:  # noqa: B027
        """Hear of a position that is in a checkpoint on the disk. May be called on one rank, and from another thread.

        Args:
            state: What `state_dict` returned.
        """

    def free(self) -> None:  # noqa: B027
        """Free what such a position has left to be freed; called in the thread that reads, where the run waits for nothing any more."""

    def metrics(self) -> dict[str, float]:
        """Return what is shown of the loader beside the metrics of an update. May be called on one rank."""
        return {}

    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are, for people who look at the run directory. May be called on one rank."""
        return {}

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""

    def finish_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self.set_epoch(self.epoch + 1)

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return the position."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position."""

    def check_world_size(self, state: Mapping[str, object]) -> None:
        """Refuse a position within a pass that was saved on another number of data ranks, each of which counts for itself."""
        if state.get("world_size", self.world_size) != self.world_size and state.get("consumed"):
            raise ValueError(
                f"Expected {state['world_size']} data ranks: the loader of split {self.split!r} "
                f"({type(self.loader).__name__}) counts what each rank has read of this epoch, which cannot be divided "
                f"anew. Received: {self.world_size}. Let the library build the loader from a dataset, or exclude "
                "'dataloaders' from loading."
            )

    def close(self) -> None:
        """End the loader's worker processes."""
        shut_down_workers(self.loader)


class KeepingLoader(Protocol):
    """A loader that keeps the position in it itself."""

    epoch: int
    """Pass of the position, from 0."""
    consumed: int
    """How far the pass is consumed."""

    def advance(self, batches: int) -> None:
        """Move the position by so many batches of each rank."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a saved position."""


class KeptCursor(Cursor):
    """Position in a loader that keeps it itself."""

    loader: KeepingLoader

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Pass of the position."""
        return self.loader.epoch

    @property
    def consumed(self) -> int:  # type: ignore[override]
        """How far the pass is consumed, as the loader counts."""
        return self.loader.consumed

    def commit(self, batches: int) -> None:
        """Move the position by so many batches of each rank."""
        self.loader.advance(batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the loader's position."""
        return dict(self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position."""
        self.loader.load_state_dict(dict(state))


class PositionCursor(KeptCursor):
    """Position in a loader of the library: `consumed` counts samples over all ranks, so that a position fits any world size."""

    kind = "position"
    foreseen = True
    loader: DataLoader

    @property
    def is_rank_local(self) -> bool:  # type: ignore[override]
        """Whether each rank has a dataset whose own state is to be saved."""
        return bool(self.loader.dataset_state)

    @property
    def even(self) -> bool:
        """Whether every rank gets the same number of batches."""
        return self.loader.even

    def num_batches(self) -> int | None:
        """Return the batches of a whole pass on this rank."""
        return len(self.loader)

    def remaining_batches(self) -> int | None:
        """Return the batches from the position on."""
        return self.loader.remaining_batches

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the position on."""
        if not self.loader.remaining_batches:
            return
        loader = self.loader
        for data, (samples, total), closes, place in zip(loader, loader.counts(), loader.closings(), loader.places()):
            yield Batch(data, samples, total, closes, (place,))

    def unread(self, data: object) -> Iterator[Batch]:
        """Yield what the batches from the position on are, with `data` in the place of theirs."""
        counts = islice(self.loader.counts(), self.loader.remaining_batches)
        for (samples, total), closes, place in zip(counts, self.loader.closings(), self.loader.places()):
            yield Batch(data, samples, total, closes, (place,))
