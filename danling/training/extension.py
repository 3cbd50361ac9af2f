"""What an extension does within a training: it takes part in updates, which an observer only watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run_state import StatePart

Totals = dict[str, tuple[float, float]]
"""Sum and weight of each metric."""


@dataclass(frozen=True)
class StateReplaced:
    """The state of the run was replaced between two updates, so that batches which were read before do not count.

    Attributes:
        moved_in_data: Whether positions were replaced too in loaders that each rank has for itself.
    """

    moved_in_data: bool


class Extension:
    """Takes part in a training. An extension overrides what it needs and is appended to the `extensions` of the training loop.

    The loop calls each method on all ranks, in the order of the list.
    """

    drives = False
    """Whether the training is a part of `train` of this extension, which may begin it again. One extension of a run at most."""

    def check_training(self, *, whole: bool) -> None:
        """A training begins: that of `train()` if `whole`, else a pass by itself. May refuse it."""

    def train(self, train: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        """Train, or do what follows a training that has ended. Called if the extension `drives`."""
        (then or train)()

    def before_update(self) -> StateReplaced | None:
        """A batch is read, and an update begins. May replace the state of the run."""
        return None

    def sum_totals(self, totals: Totals) -> Totals:
        """Return sums and weights of metrics over all that train together, of those of this run."""
        return totals

    def ends_pass(self) -> bool:
        """Whether the pass ends after the update that was just made, though its loader has more batches."""
        return False

    def evaluation_saved(self) -> None:
        """The evaluations after an epoch or an interval are made, and what follows from them is saved."""

    def progress_parts(self) -> list[StatePart]:
        """Return the parts that the extension adds to the entry `state` of a checkpoint."""
        return []

    def saves(self) -> bool:
        """Whether this run writes its checkpoints, and not another one that trains with it."""
        return True

    def training_finished(self) -> None:
        """A training has come to its end without a failure, and everything is written."""
