"""Whether a run is ready to train: what is missing, what would train nothing, and what has no effect."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from danling.distributed import Domain
from danling.optim.building import check_metric_of_schedule

from .component_checks import (
    Coverage,
    check_criterion,
    check_mapping,
    check_metrics,
    check_model,
    check_optimizer,
    check_passes,
    check_scheduler,
)
from .preparation import ModelPreparation

logger = logging.getLogger("danling")


class GivenComponents(Protocol):
    """What a user puts on a run. Any of it may be of a wrong type, and may be replaced at any time."""

    @property
    def model(self) -> Any: ...
    @property
    def criterion(self) -> object: ...
    @property
    def ema(self) -> object: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def scheduler(self) -> object: ...
    @property
    def metrics(self) -> object: ...
    @property
    def datasets(self) -> Mapping[str, object]: ...
    @property
    def dataloaders(self) -> Mapping[str, object]: ...
    @property
    def epochs(self) -> int | None: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters of model and criterion."""


def check_components(given: GivenComponents, present: Iterable[str], *, reserved: Iterable[str]) -> None:
    """Refuse a slip among the components before anything is made of them."""
    check_model(given.model, present)
    check_criterion(given.criterion)
    check_scheduler(given.scheduler)
    check_metrics(given.metrics, reserved)
    check_mapping("datasets", given.datasets)
    check_mapping("dataloaders", given.dataloaders)
    check_passes({**given.datasets, **given.dataloaders}, given.epochs)
    check_optimizer(given.optimizer, given.named_parameters())


def takes_closure(optimizer: object) -> bool:
    """Whether `optimizer.step` cannot be called without a closure, as that of LBFGS."""
    step = getattr(type(optimizer), "step", None)
    parameter = inspect.signature(step).parameters.get("closure") if step is not None else None
    return parameter is not None and parameter.default is inspect.Parameter.empty


class Readiness:
    """Looks at a run before it trains."""

    def __init__(
        self,
        given: GivenComponents,
        *,
        world: Domain,
        preparation: ModelPreparation,
        overrides: Callable[[str], bool],
        interval: Callable[[], str],
        monitors: Callable[[], bool],
        bound: bool = False,
        speaks: bool = True,
    ) -> None:
        self._given = given
        self._world = world
        self._preparation = preparation
        self._overrides = overrides
        self._interval = interval
        self._monitors = monitors
        self._bound = bound
        self._speaks = speaks
        self._has_spoken = False

    def check_optimizer_given(self) -> None:
        """Refuse to train without an optimizer. No communication: may be called on one rank."""
        if self._given.optimizer is None:
            built = "`build_optimizer` returned none. " if self._overrides("build_optimizer") else ""
            raise ValueError(
                f"Expected an optimizer. Received: optimizer=None. {built}Assign `self.optimizer` in __init__, several as one "
                "dl.optim.JointOptimizer, or set `optim.type`."
            )

    def check_optimizer(self) -> None:
        """Refuse an optimizer that does not take the gradient as it is, or trains nothing of the model. Called on all ranks.

        What it leaves out is said once.
        """
        self.check_optimizer_given()
        given = self._given
        kind = type(given.optimizer).__name__
        if takes_closure(given.optimizer) and not (self._overrides("step") and self._overrides("optimizer_step")):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {kind}, whose step calls a closure again and "
                "again. Override both `step` and `optimizer_step` for it, or choose another."
            )
        mine = Coverage.of(given.named_parameters(), self._preparation.optimized_parameters(given.optimizer))
        whole = Coverage.joined(self._world.gather_objects(mine))
        whole.check(kind)
        if self._bound or given.ema is not None:
            self._preparation.check_constructed(given.model)
        if self._speaks and not self._has_spoken:
            for message in whole.warnings(kind):
                logger.warning("%s", message)
        self._has_spoken = True

    def check_schedule(self, *, evaluates: bool) -> None:
        """Refuse a schedule that goes by a metric which nobody makes. No communication: may be called on one rank."""
        check_metric_of_schedule(
            self._given.scheduler, interval=self._interval(), evaluates=evaluates, monitors=self._monitors()
        )

    def unset(self) -> list[str]:
        """Return the components that neither the user nor the configuration has given."""
        run = self._given
        own_loss = self._overrides("compute_loss") or self._overrides("train_step")
        has_data = bool(run.datasets or run.dataloaders)
        given = {
            "criterion": run.criterion is not None or own_loss,
            "optimizer": run.optimizer is not None,
            "scheduler": run.scheduler is not None,
            "datasets": has_data,
            "dataloaders": has_data,
        }
        return [name for name, is_there in given.items() if not is_there]
