"""What a batch is, and loaders of one order of samples that grows while it is read: what they are told of a run, and asked by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Batch(NamedTuple):
    """One batch as a loader delivered it.

    Attributes:
        data: What the loader delivered.
        samples: Real samples on this rank, 0 for padding, `None` where only the data could tell.
        total: Real samples over all ranks, `None` where it is not known.
        closes: Whether it is the last one of its update, `None` where `accum_steps` says so.
        place: Where it is in the pass, which random numbers are keyed by: the position of its first sample in an order that all ranks
            share, else the rank and the number of the batch. Equal on ranks of one data coordinate, and after a resume.
        ordinal: With `gradient_sum: canonical`, its number in the update, over all ranks, and how many micro-batches the update has.
    """

    data: Any
    samples: int | None
    total: int | None
    closes: bool | None = None
    place: tuple[int, ...] = ()
    ordinal: tuple[int, int] | None = None


def _ignore(*_: object) -> None:
    """Neither answer nor end a wait."""


def _unnamed() -> str:
    """Return no identity."""
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
    unsaved_updates: Callable[[], int | None] = _ignore
    waiting: Callable[[int], None] = _ignore
    waited: Callable[[], None] = _ignore
    over: Callable[[], None] = _ignore


@runtime_checkable
class WindowLoader(Protocol):
    """A loader that divides whole updates over the ranks itself, so that all of them end a pass at the same one without a word.

    Its position counts samples over all ranks, and means the same on any number of them.
    """

    epoch: int
    """Pass of the position, from 0."""
    consumed: int
    """Samples of the pass that are consumed."""

    def take_place(self, place: ReaderPlace) -> None:
        """Hear where it is read; called before anything else."""

    def micro_batches(self, *, read: bool) -> Iterator[Batch]:
        """Yield the micro-batches of this rank from the position on, each with its place in the order.

        Args:
            read: Whether their data is needed; else it is `None`.
        """

    def advance(self, batches: int) -> None:
        """Move the position by so many batches of each rank."""

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a saved position."""

    def commit_state(self, state: Mapping[str, Any]) -> None:
        """Free the data before a position that is in a checkpoint on the disk. May be called on one rank, and from another thread."""

    def free(self) -> None:
        """Free the data that `commit_state` left to be freed; called in the thread that reads."""

    def metrics(self) -> dict[str, float]:
        """Return the figures of the loader that are logged with the metrics of an update. May be called on one rank."""

    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are, as plain values: `stream`, a name that both sides know, `side`,
        `published`, `trained`, `waited_seconds` and `end`. May be called on one rank."""

    def close(self) -> None:
        """Let go of what the loader has opened."""
