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


def component_parts(held: Components, frozen: Callable[[], FrozenWeights | None] = lambda: None) -> list[StatePart]:
    """Return model, criterion, averages, optimizer and scheduler, in the order in which they are restored.

    Args:
        held: What has them; it is asked anew each time.
        frozen: What is left out of them and known by a digest, which comes first: what returns it, or `None` where all weights are saved.
    """

    def model_state() -> Mapping[str, object]:
        state = held.model_state_dict()
        kept = frozen()
        return state if kept is None else kept.without(state)

    def ema_state() -> Mapping[str, object]:
        state = held.ema.state_dict()
        kept = frozen()
        return state if kept is None else {**state, "weights": kept.without(state["weights"])}

    def frozen_state() -> dict[str, object]:
        kept = frozen()
        return {} if kept is None else kept.identity()

    def check_frozen(state: Mapping[str, Any], _: Collection[str]) -> None:
        kept = frozen()
        if kept is not None:
            kept.check(state)

    def load_model(state: Mapping[str, object], excluded: Collection[str]) -> None:
        kept = frozen()
        state = state if kept is None else kept.completed(state, held.model_state_dict())
        held.load_model(state, partial=any(path.startswith("model.") for path in excluded))

    def load_ema(state: Mapping[str, object], excluded: Collection[str]) -> None:
        averages: dict[str, Any] = {"weights": {}, "num_updates": held.ema.num_updates, **state}
        kept = frozen()
        if kept is not None:
            averages["weights"] = kept.completed(averages["weights"], held.ema.weights)
        held.load_ema(averages, partial=any(path.startswith("ema.weights") for path in excluded))

    def load_optimizer(state: Mapping[str, object], excluded: Collection[str]) -> None:
        held.load_optimizer(remainder_of_optimizer(state, excluded, held.optimizer_state_dict))

    def load_scheduler(state: Mapping[str, object], excluded: Collection[str]) -> None:
        kept = held.scheduler.state_dict() if any(path.startswith("scheduler.") for path in excluded) else {}
        held.load_scheduler({**kept, **state})

    return [
        StatePart("frozen", frozen_state, check_frozen, exists=lambda: frozen() is not None),
        StatePart("model", model_state, load_model),
        StatePart(
            "criterion",
            lambda: criterion_state(held.criterion),
            lambda state, _: load_criterion(held.criterion, state),
            exists=lambda: bool(criterion_state(held.criterion)),
        ),
        StatePart("ema", ema_state, load_ema, exists=lambda: held.ema is not None),
        StatePart(
            "optimizer",
            lambda: held.optimizer_state_dict(),
            load_optimizer,
            exists=lambda: held.optimizer is not None,
        ),
        StatePart(
            "scheduler",
            lambda: held.scheduler.state_dict(),
            load_scheduler,
            exists=lambda: held.scheduler is not None,
        ),
    ]
