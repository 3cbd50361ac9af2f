"""How the samples of an update are cut, and how many updates a pass has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .shares import Division
from .splits import Splits


class UpdatePlan:
    """What an update is made of on this rank, read anew at every question: settings and loaders may change at any time.

    Args:
        splits: Names, settings and loaders of the splits.
        trained: Returns the splits to train on.
        shares: Returns how many ranks read different data of a split.
        accum_steps: Returns the micro-batches of an update that is not divided.
    """

    def __init__(
        self,
        splits: Splits,
        *,
        trained: Callable[[], Sequence[str]],
        shares: Callable[[str], int],
        accum_steps: Callable[[], int],
    ) -> None:
        self.undivided = accum_steps
        self._splits, self._trained, self._shares = splits, trained, shares

    def division(self, split: str | None = None) -> Division | None:
        """Return how updates are divided over ranks and micro-batches; `None` where batches have a size of their own.

        Args:
            split: A split to train on; `None` takes the first one.
        """
        if split is None:
            split = next(iter(self._trained()), None) if self._splits.names else None
        return self._splits.division(split, self._shares(split)) if split is not None else None

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches of a full update that is divided, of the first split to train on; `None` where none is."""
        division = self.division()
        return None if division is None else division.micro_batches

    @property
    def batch_size(self) -> int | None:
        """Batch size of a rank on the first split to train on, or the most samples that it holds at once; `None` when not known."""
        split = next(iter(self._trained()), None) or next(iter(self._splits.loaded), None)
        if split is None:
            return None
        division = self.division()
        return division.micro_batch_size if division is not None else self._splits.batch_size(split)

    @property
    def updates_of_epoch(self) -> int | None:
        """Updates of one pass over all splits to train on; `None` where a loader does not know."""
        return self._splits.updates(self._trained())

    @property
    def finds_micro_batch_size(self) -> bool:
        """Whether the micro-batches of a split to train on are halved when memory runs out."""
        return bool(self._splits.names) and self._splits.find_micro_batch_size(self._trained())

    def hold_at_most(self, samples: int | None) -> None:
        """Cut updates so that a rank holds at most so many samples at once.

        Args:
            samples: How many; `None` leaves updates as they are.
        """
        if samples is not None and self.finds_micro_batch_size:
            self._splits.hold_at_most(samples or 1, self._trained())
