"""Whether a run is ready to train: what is missing, what would train nothing, and what has no effect."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")


def check_components(given: TorchRunner, present: Iterable[str], *, reserved: Iterable[str]) -> None:
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

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._has_spoken = False

    def check_optimizer_given(self) -> None:
        """Refuse to train without an optimizer. No communication: may be called on one rank."""
        if self._runner.optimizer is None:
            built = "`build_optimizer` returned none. " if self._runner._overrides("build_optimizer") else ""
            raise ValueError(
                f"Expected an optimizer. Received: optimizer=None. {built}Assign `self.optimizer` in __init__, several as one "
                "dl.optim.JointOptimizer, or set `optim.type`."
            )

    def check_optimizer(self) -> None:
        """Refuse an optimizer that does not take the gradient as it is, or trains nothing of the model. Called on all ranks.

        What it leaves out is said once.
        """
        self.check_optimizer_given()
        given = self._runner
        kind = type(given.optimizer).__name__
        if takes_closure(given.optimizer) and not (
            self._runner._overrides("step") and self._runner._overrides("optimizer_step")
        ):
            raise ValueError(
                f"Expected an optimizer whose step takes the gradient as it is. Received: {kind}, whose step calls a closure again and "
                "again. Override both `step` and `optimizer_step` for it, or choose another."
            )
        mine = Coverage.of(given.named_parameters(), self._runner.preparation.optimized_parameters(given.optimizer))
        whole = Coverage.joined(self._runner.world.gather_objects(mine))
        whole.check(kind)
        if given.distributed or given.stack != "ddp" or given.ema is not None:
            self._runner.preparation.check_constructed(given.model)
        if given.is_main_process and not self._has_spoken:
            for message in whole.warnings(kind):
                logger.warning("%s", message)
        self._has_spoken = True

    def check_schedule(self, *, evaluates: bool) -> None:
        """Refuse a schedule that goes by a metric, if no evaluation computes one. No communication: may be called on one rank."""
        runner = self._runner
        interval, monitors = runner._parts.scheduler_interval(), "monitor" in runner.config.get("scheduler", {})
        check_metric_of_schedule(runner.scheduler, interval=interval, evaluates=evaluates, monitors=monitors)

    def unset(self) -> list[str]:
        """Return the components that neither the user nor the configuration has given."""
        run = self._runner
        own_loss = self._runner._overrides("compute_loss") or self._runner._overrides("train_step")
        has_data = bool(run.datasets or run.dataloaders)
        given = {
            "criterion": run.criterion is not None or own_loss,
            "optimizer": run.optimizer is not None,
            "scheduler": run.scheduler is not None,
            "datasets": has_data,
            "dataloaders": has_data,
        }
        return [name for name, is_there in given.items() if not is_there]
