"""The components of a training in a checkpoint: model, criterion, averages, optimizer and schedule, as parts of the run's state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from .frozen import FrozenWeights
from .model_states import criterion_state, load_criterion, remainder_of_optimizer
from .run_state import StatePart


class Components(Protocol):
    """What a training is made of, and how each piece of it is saved and restored. Any of it may be replaced at any time."""

    criterion: Any
    ema: Any
    optimizer: Any
    scheduler: Any

    def model_state_dict(self) -> dict[str, object]:
        """Return parameters and persistent buffers by canonical name."""

    def optimizer_state_dict(self) -> dict[str, object]:
        """Return the optimizer's state by parameter name."""

    def load_model(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Load weights; `partial` allows names to be missing."""

    def load_ema(self, state: Mapping[str, object], *, partial: bool = False) -> None:
        """Restore averaged weights; `partial` allows names to be missing."""

    def load_optimizer(self, state: Mapping[str, object]) -> None:
        """Restore the optimizer."""

    def load_scheduler(self, state: Mapping[str, object]) -> None:
        """Restore the scheduler."""


def component_parts(
    held: Components,
    frozen: FrozenWeights | None = None,
    *,
    leaves_out: Callable[[], bool] = lambda: False,
    load_base: Callable[[], bool] = lambda: False,
) -> list[StatePart]:
    """Return frozen weights, model, criterion, averages, optimizer and scheduler, in the order in which they are restored."""
    weights = _Weights(held, frozen, leaves_out, load_base)
    return [
        StatePart("frozen", weights.frozen, weights.check_frozen, exists=weights.saved_without, optional=True),
        StatePart("model", weights.model, weights.load_model),
        StatePart(
            "criterion",
            lambda: criterion_state(held.criterion),
            lambda state, _: load_criterion(held.criterion, state),
            exists=lambda: bool(criterion_state(held.criterion)),
        ),
        StatePart("ema", weights.averages, weights.load_averages, exists=lambda: held.ema is not None),
        *_trained_by(held),
    ]


def _trained_by(held: Components) -> list[StatePart]:
    """Return optimizer and scheduler."""

    def load_optimizer(state: Mapping[str, object], excluded: Collection[str]) -> None:
        held.load_optimizer(remainder_of_optimizer(state, excluded, held.optimizer_state_dict))

    def load_scheduler(state: Mapping[str, object], excluded: Collection[str]) -> None:
        kept = held.scheduler.state_dict() if any(path.startswith("scheduler.") for path in excluded) else {}
        held.load_scheduler({**kept, **state})

    return [
        StatePart(
            "optimizer", lambda: held.optimizer_state_dict(), load_optimizer, exists=lambda: held.optimizer is not None
        ),
        StatePart(
            "scheduler", lambda: held.scheduler.state_dict(), load_scheduler, exists=lambda: held.scheduler is not None
        ),
    ]


class _Weights:
    """Model and averages in a checkpoint, whole or without what is frozen.

    Which of the two was saved is told by the checkpoint, and what will be saved by the setting: a run may change over.
    """

    def __init__(
        self,
        held: Components,
        frozen: FrozenWeights | None,
        leaves_out: Callable[[], bool],
        load_base: Callable[[], bool],
    ) -> None:
        self._held = held
        self._frozen = frozen
        self._leaves_out = leaves_out
        self._load_base = load_base
        self._stored_without = False
        """Whether the checkpoint that is being loaded holds what was trained alone."""

    def saved_without(self) -> bool:
        """Whether frozen weights are left out of what is saved now."""
        return self._frozen is not None and self._leaves_out()

    def frozen(self) -> dict[str, object]:
        """Return what the frozen weights are known by."""
        return {} if self._frozen is None else self._frozen.identity()

    def check_frozen(self, state: Mapping[str, Any], excluded: Collection[str]) -> None:
        """Compare the frozen weights with those that a checkpoint was made on, if it holds what was trained alone."""
        self._stored_without = self._frozen is not None and (bool(state) or "frozen" in excluded)
        if self._frozen is not None and state:
            self._frozen.check(state, self._load_base)

    def model(self) -> Mapping[str, object]:
        """Return the weights that are saved."""
        return self._to_save(self._held.model_state_dict())

    def load_model(self, state: Mapping[str, object], excluded: Collection[str]) -> None:
        """Restore weights, of which the frozen ones are those that the model was made with."""
        if self._frozen is not None and (self._stored_without or self._leaves_out()):
            here = self._held.model_state_dict()
            if self._stored_without:
                state = self._frozen.completed(state, here)
            else:
                self._frozen.note_moved(state, here)
        self._held.load_model(state, partial=any(path.startswith("model.") for path in excluded))

    def averages(self) -> Mapping[str, object]:
        """Return the averages that are saved."""
        state = self._held.ema.state_dict()
        return {**state, "weights": self._to_save(state["weights"])} if self.saved_without() else state

    def load_averages(self, state: Mapping[str, object], excluded: Collection[str]) -> None:
        """Restore averages, of which those of frozen weights are as they are here."""
        averages: dict[str, Any] = {"weights": {}, "num_updates": self._held.ema.num_updates, **state}
        if self._frozen is not None and self._stored_without:
            averages["weights"] = self._frozen.completed(averages["weights"], self._held.ema.weights)
        self._held.load_ema(averages, partial=any(path.startswith("ema.weights") for path in excluded))

    def _to_save(self, weights: Mapping[str, object]) -> Mapping[str, object]:
        return self._frozen.without(weights) if self._frozen is not None and self._leaves_out() else weights
