"""Names what components change in training and no checkpoint contains: their own numbers, and optimizers within an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from danling.optim import JointOptimizer
from danling.optim.state import inner_optimizers
from danling.utils.messages import listed
from danling.utils.observers import Observer
from danling.utils.tensors import local_part
from danling.utils.trees import tensors

from .pass_settings import PassSettings, modules_of

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_NUMBERS = (bool, int, float, complex, str)
_STATE_METHODS = ("get_extra_state", "state_dict", "_save_to_state_dict")


class UnsavedChanges(Observer):
    """Warns once, at a save, of numbers and text that modules or the optimizer have changed, and of state of an optimizer within it.

    Left out are names that begin with an underscore, flags of an optimizer, what `on_pass_start` has set, which is saved, and components
    whose class overrides `get_extra_state` or `state_dict`.
    """

    def __init__(self, runner: TorchRunner, pass_settings: PassSettings) -> None:
        self._runner = runner
        self._pass_settings = pass_settings
        self._before: dict[str, object] = {}
        self._named: set[str] = set()

    def training_started(self) -> None:
        self._before = self._values()

    def save_started(self) -> None:
        runner = self._runner
        changed = [
            name
            for name, value in self._values().items()
            if value is not self._before.get(name, value)
            and not _is_same(self._before[name], value)
            and name not in self._pass_settings.names
        ]
        names = self._new(changed)
        if names and runner.is_main_process:
            logger.warning(
                "Training has changed %s, which no checkpoint contains: a resumed run begins with what the program sets. If the program "
                "sets it again from the step or the epoch, or it does not matter, ignore this; otherwise make it a buffer, or define "
                "get_extra_state and set_extra_state (in an optimizer: state_dict and load_state_dict).",
                listed(names),
            )
        if runner.stack == "deepspeed":
            return  # its checkpoints have all that its engine holds
        names = self._new(
            [name for optimizer in _members(runner.optimizer) for name in _lost_states(optimizer)]
        )
        if names and runner.is_main_process:
            logger.warning(
                "The state of %s is not in the state_dict of the optimizer that it belongs to, so no checkpoint contains it: a resumed run "
                "begins without, such as without momentum. Return its state_dict() from state_dict, and load it in load_state_dict.",
                listed(names),
            )

    def _new(self, names: list[str]) -> list[str]:
        found = [name for name in names if name not in self._named]
        self._named.update(found)
        return found

    def _values(self) -> dict[str, object]:
        """Return the numbers and the text of all components by name: one call at each save."""
        components: list[tuple[str, Any, type[Any]]] = [
            (path, module, nn.Module) for path, module in modules_of(self._runner)
        ]
        components += [
            ("optimizer", optimizer, Optimizer) for optimizer in _members(self._runner.optimizer)
        ]
        values: dict[str, object] = {}
        for path, component, base in components:
            kind = type(component)
            if [
                name
                for name in _STATE_METHODS
                if getattr(kind, name, None) is not getattr(base, name, None)
            ]:
                continue
            # A flag of an optimizer says that it has begun, such as `initialized` of those of bitsandbytes, or in which mode it is.
            kinds = _NUMBERS[1:] if base is Optimizer else _NUMBERS
            for name, value in vars(component).items():
                if type(value) in kinds and not name.startswith("_") and name != "training":
                    values[f"{path}.{name}"] = value
        return values


def _is_same(before: object, value: object) -> bool:
    # NaN is not equal to itself.
    return type(before) is type(value) and (
        before == value or (before != before and value != value)
    )


def _members(optimizer: Any) -> list[Any]:
    """Return the optimizers of the program: those of a `JointOptimizer`, or the one that there is."""
    return list(optimizer.optimizers) if isinstance(optimizer, JointOptimizer) else [optimizer]


def _lost_states(optimizer: Any) -> Iterator[str]:
    """Yield the optimizers within one whose tensors are not in its `state_dict`, as they are or as copies."""
    saved: list[Tensor] | None = None
    for name, inner in inner_optimizers(optimizer):
        tensor = _largest(inner.state)
        if tensor is None:
            continue
        if saved is None:
            saved = [each for _, each in tensors(optimizer.state_dict())]
        if not any(tensor is each or _equal(tensor, each) for each in saved):
            yield f"optimizer.{name} ({type(inner).__name__})"


def _largest(state: Mapping[Any, Any]) -> Tensor | None:
    """Return the largest tensor of a state: a number of steps may be equal to that of another optimizer."""
    found = [tensor for of_parameter in state.values() for _, tensor in tensors(of_parameter)]
    return max(found, key=Tensor.numel, default=None)


def _equal(tensor: Tensor, other: Tensor) -> bool:
    tensor, other = local_part(tensor), local_part(other)
    alike = (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(tensor, other)
