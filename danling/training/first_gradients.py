"""Whether the gradients of the first update are those of the parameters that are trained, and in their scale."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.utils.hooks import is_overridden
from danling.utils.messages import listed
from danling.utils.observers import Observer

if TYPE_CHECKING:
    from danling.distributed import StepTotals
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_MOST_ITEMS = 256
"""Items of a list or dictionary of the program in which modules are looked for."""

_UNSCALING = (
    "backward",
    "step",
    "complete_gradients",
    "unscale_gradients",
    "clip_gradients",
    "optimizer_step",
    "train_steps",
    "train_epoch",
)
"""Methods other than `train_step` in which a program can unscale gradients."""


class FirstGradients(Observer):
    """Warns of parameters whose gradients and optimizer do not go together in the first update, then removes itself.

    These are trained parameters without a gradient (not with several optimizers, each of which has its own updates), parameters with
    a gradient that neither the model nor an optimizer has, and gradients that a loss scaler of the program's has left scaled. Also named
    is a `train_step` whose forward the precision of the run does not reach.
    """

    def __init__(self, runner: TorchRunner, *, has_phases: bool) -> None:
        self._runner = runner
        self._has_phases = has_phases
        self._scalers: dict[str, tuple[torch.amp.GradScaler, dict[str, Any]]] = {}

    def training_started(self) -> None:
        """Note the state of loss scalers of the program's."""
        runner = self._runner
        own = {
            name: value for name, value in vars(runner).items() if name not in runner.library_names
        }
        # It may be that of another optimizer, which train_step steps.
        has_others = any(isinstance(value, torch.optim.Optimizer) for value in own.values())
        unscales = has_others or any(is_overridden(runner, name) for name in _UNSCALING)
        if is_overridden(runner, "train_step") and not unscales:
            self._scalers = {
                name: (each, each.state_dict())
                for name, each in own.items()
                if isinstance(each, torch.amp.GradScaler) and each.is_enabled()
            }

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        """Forget contexts that were entered before, such as those of the evaluation that is tried before the first update."""
        self._runner.precision.is_entered = False

    def gradients_ready(self, totals: StepTotals, norm: Tensor) -> None:
        """Look at the gradients. Called on all ranks."""
        runner = self._runner
        # A window without weight has no gradient to look at: the next one is the first.
        if not float(totals.weight):
            return
        runner.observers.remove(self)
        self._name_scalers()
        self._name_precision()
        optimized = runner.preparation.optimized_parameters(runner.optimizer)
        self._name_unknown(optimized)
        # Each of several optimizers has its own updates, in which the parameters of the others have no gradient.
        if self._has_phases:
            return
        mine = runner.reduction.without_gradient({id(parameter) for parameter in optimized})
        missing = dict.fromkeys(
            name for names in runner.world.gather_objects(mine) for name in names
        )
        if not missing:
            return
        # Another rank may have its gradient.
        trained = {name for name, parameter in runner.named_parameters() if parameter.requires_grad}
        found = set().union(*runner.world.gather_objects((trained - set(mine)) & missing.keys()))
        names = [name for name in missing if name not in found]
        if names and runner.is_main_process:
            logger.warning(
                "Expected a gradient for every parameter that is trained. Received: none in the first update for %s. The loss does not "
                "depend on them: use them in `forward`, or freeze them with requires_grad_(False).",
                listed(names),
            )

    def _name_scalers(self) -> None:
        """Name a loss scaler that train_step has not updated: where gradients are unscaled, that is needed for the next time."""
        for name, (scaler, before) in self._scalers.items():
            if scaler.state_dict() == before and self._runner.is_main_process:
                logger.warning(
                    "self.%s is a %s, and nothing takes its scale out of the gradients again: an update would be as many times too large. "
                    "Set precision='fp16', with which the runner scales losses itself, and remove it.",
                    *(name, type(scaler).__name__),
                )

    def _name_precision(self) -> None:
        """Name a precision that has no effect, since `train_step` has not entered the context that casts."""
        runner = self._runner
        steps = is_overridden(runner, "train_step") and not is_overridden(runner, "forward_context")
        # A DeepSpeed engine with weights in bfloat16 sets a precision by itself.
        is_set = runner.precision.dtype is not None and runner.config.precision is not None
        if not (steps and is_set) or runner.precision.is_entered or not runner.is_main_process:
            return
        logger.warning(
            "Expected train_step to enter self.forward_context(), in which precision=%r casts. Received: a first update without it, so "
            "that the forward ran in the precision of the weights, unless train_step casts by itself. Write `with self.forward_context():` "
            "around the forward and the loss, before self.backward(loss).",
            runner.config.precision,
        )

    def _name_unknown(self, optimized: Iterable[nn.Parameter]) -> None:
        """Name parameters outside of the model that the loss depends on. May be called on one rank."""
        runner = self._runner
        # A program may have its own optimizers, which train_step steps.
        optimizers = [
            item for _, item in _values(runner) if isinstance(item, torch.optim.Optimizer)
        ]
        of_others = (
            parameter
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        known = {id(parameter) for parameter in (*optimized, *of_others)}
        known.update(id(parameter) for _, parameter in runner.named_parameters())
        outside = {name: p for name, p in parameters_outside(runner).items() if id(p) not in known}
        names = [name for name, parameter in outside.items() if parameter.grad is not None]
        if names and runner.is_main_process:
            logger.warning(
                "Expected every parameter that the loss depends on to be part of self.model. Received: a gradient for %s, which no "
                "optimizer updates and no checkpoint has by name. Make the modules part of self.model (lists of layers as nn.ModuleList), "
                "or freeze them with requires_grad_(False).",
                listed(names),
            )


def parameters_outside(runner: TorchRunner) -> dict[str, nn.Parameter]:
    """Return parameters of the program that are no part of its model, by where they are.

    Looked at are attributes of the runner, and plain lists, tuples and dictionaries in modules of the model, which torch does not register.
    """
    found: dict[str, nn.Parameter] = {}
    for where, item in _values(runner):
        if isinstance(item, nn.Parameter):
            found[where] = item
        elif isinstance(item, nn.Module):
            found.update(
                {f"{where}.{name}": parameter for name, parameter in item.named_parameters()}
            )
    return found


def _values(runner: TorchRunner) -> Iterator[tuple[str, object]]:
    """Yield what `parameters_outside` looks at, with its place."""
    # The parameters of the criterion belong to the run as those of the model do.
    taken = ("model", "criterion", "ema")
    places = [
        (f"self.{name}", value)
        for name, value in vars(runner).items()
        if name not in taken and name[0] != "_"
    ]
    for name, module in runner.unwrapped_model.named_modules():
        prefix = f"model.{name}" if name else "model"
        places += [
            (f"{prefix}.{key}", value) for key, value in vars(module).items() if key[0] != "_"
        ]
    for place, value in places:
        if type(value) in (list, tuple):
            yield from (
                (f"{place}[{index}]", item) for index, item in enumerate(value[:_MOST_ITEMS])
            )
        elif type(value) is dict:
            yield from (
                (f"{place}[{key!r}]", item) for key, item in islice(value.items(), _MOST_ITEMS)
            )
        else:
            yield place, value
