"""Loaders of one order of samples that all ranks share and that grows while it is read: what they are told of a run, and asked by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from .cursors import Batch, KeepingLoader, KeptCursor


def _nothing() -> None:
    """Nobody needs to know."""


def _wait(place: int) -> None:
    """Nobody asks for an end of the wait."""


def _unknown() -> None:
    """Nobody knows."""


def _unnamed() -> str:
    """No identity."""
    return ""


@dataclass(frozen=True)
class ReaderPlace:
    """Where a loader is read.

    Attributes:
        split: Its split.
        rank: Which share of each update this rank reads.
        world_size: How many shares there are.
        accum_steps: Micro-batches of an update on each rank.
        seed: Base seed of the run.
        is_main: Whether this process acts for all of them where one has to, such as in freeing what was read.
        trained: Whether the split is trained on; else it is evaluated.
        run: Returns the identity of the run.
        unsaved_updates: Returns how many updates are made at most until the first of them is in a checkpoint that is on the disk;
            `None` where no checkpoint is due within a pass.
        waiting: Called again and again while there is nothing to read, with the place that is waited for; what it raises ends the wait.
        waited: Called after a wait, before it is gone on; what it raises ends the pass.
        over: Called where nothing is left for good, at the same update on all ranks; what it raises ends the training.
    """

    split: str = "train"
    rank: int = 0
    world_size: int = 1
    accum_steps: int = 1
    seed: int = 0
    is_main: bool = True
    trained: bool = True
    run: Callable[[], str] = _unnamed
    unsaved_updates: Callable[[], int | None] = _unknown
    waiting: Callable[[int], None] = _wait
    waited: Callable[[], None] = _nothing
    over: Callable[[], None] = _nothing


@runtime_checkable
class WindowLoader(KeepingLoader, Protocol):
    """A loader that divides whole updates over the ranks itself, so that all of them end a pass at the same one without a word.

    Its position counts samples over all ranks, and means the same on any number of them.
    """

    def take_place(self, place: ReaderPlace) -> None:
        """Hear where it is read; called before anything else."""

    def micro_batches(self, *, read: bool) -> Iterator[Batch]:
        """Yield the micro-batches of this rank from the position on, each with its place in the order.

        Args:
            read: Whether their data is needed; else it is `None`.
        """

    def commit_state(self, state: Mapping[str, Any]) -> None:
        """Free what lies before a position that is in a checkpoint on the disk. May be called on one rank, and from another thread."""

    def free(self) -> None:
        """Free what such a position has left to be freed; called in the thread that reads."""

    def metrics(self) -> dict[str, float]:
        """Return what is shown of the loader beside the metrics of an update. May be called on one rank."""

    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are, as plain values: `stream`, a name that both sides know, `side`,
        `published`, `trained`, `waited_seconds` and `end`. May be called on one rank."""

    def close(self) -> None:
        """Let go of what the loader has opened."""


class WindowCursor(KeptCursor):
    """Position in a `WindowLoader`: `consumed` counts samples over all ranks, so that a position fits any world size."""

    kind = "window"
    is_rank_local = False
    foreseen = True
    loader: WindowLoader

    @property
    def even(self) -> bool:
        """Every rank gets the same number of batches."""
        return True

    def num_batches(self) -> int | None:
        """Return `None`: the order may grow."""
        return None

    def remaining_batches(self) -> int | None:
        """Return `None`: the order may grow."""
        return None

    def batches(self) -> Iterator[Batch]:
        """Return the batches from the position on."""
        return self.loader.micro_batches(read=True)

    def unread(self, data: object) -> Iterator[Batch]:
        """Return what the batches are, with `data` in the place of theirs."""
        return (batch._replace(data=data) for batch in self.loader.micro_batches(read=False))

    def commit_state(self, state: Mapping[str, object]) -> None:
        """Free what lies before a position that is in a checkpoint on the disk."""
        self.loader.commit_state(state)

    def free(self) -> None:
        """Let the loader free what is due."""
        self.loader.free()

    def metrics(self) -> dict[str, float]:
        """Return what is shown of the loader."""
        return self.loader.metrics()

    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are."""
        return self.loader.standing()

    def close(self) -> None:
        """Close the loader."""
        self.loader.close()
