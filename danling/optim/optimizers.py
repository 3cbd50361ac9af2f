"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from danling.utils.messages import did_you_mean

from .registry import Registry

# Not SGD and Adagrad: their fused forms refuse sparse gradients, which cannot be told from the parameters.
_FUSED = (torch.optim.Adam, torch.optim.AdamW)
_IMPLEMENTATIONS = frozenset({"fused", "foreach", "differentiable", "capturable"})
_GROUP_KEYS = ("params", "param_names", "name", "initial_lr")


class OptimizerRegistry(Registry):
    """Every optimizer of `torch.optim` by its lower-case name, and what users register."""

    def build(self, params: object, type: str | None = None, **options: Any) -> Optimizer:
        """Build an optimizer.

        Adam and AdamW are fused where all parameters are plain floating tensors on one CPU or CUDA device, unless `fused` or
        `foreach` (or `capturable`, `differentiable`) is given; that differs from the loop over tensors by rounding only.
        Lists are taken where the optimizer wants a tuple, as for `betas`.
        """
        self.check_options(type, options)
        builder = self.lookup(type)
        entries = _listed(params)
        if not _tensors(entries):
            raise ValueError(
                f"Expected at least one parameter that requires a gradient for optimizer {type!r}. Received: none. Unfreeze a layer."
            )
        entries = [self._checked_group(type, entry) if isinstance(entry, dict) else entry for entry in entries]
        options = _with_tuples(builder, options)
        if _can_fuse(builder, entries, options):
            options["fused"] = True
        optimizer: Optimizer = builder(entries, **options)
        return optimizer

    def _checked_group(self, name: str | None, group: dict[str, Any]) -> dict[str, object]:
        # torch keeps an unknown key of a group and does nothing with it.
        valid = self.options(name)
        for key in group:
            if valid is not None and key not in valid and key not in _GROUP_KEYS:
                raise ValueError(
                    f"Expected options of a parameter group of optimizer {name!r} out of {', '.join(valid)}. Received: {key!r}."
                    f"{did_you_mean(key, valid)}"
                )
        return _with_tuples(self.lookup(name), group)


def _listed(params: Any) -> list[object]:
    """Return parameters or groups as lists: they are looked at before torch gets them, and may be generators."""
    if isinstance(params, (set, frozenset)):
        raise ValueError(
            "Expected parameters in an order that is the same in every process. Received: a set. Pass a list, such as "
            "list(model.parameters())."
        )
    entries = [params] if isinstance(params, (Tensor, Mapping)) else list(params)
    return [_listed_group(entry) if isinstance(entry, Mapping) else entry for entry in entries]


def _listed_group(group: Mapping[str, object]) -> dict[str, object]:
    if "params" not in group:
        raise ValueError(f"Expected every parameter group to have `params`. Received: keys {sorted(group)}.")
    return {**group, "params": _listed(group["params"])}


def _tensors(entries: Sequence[object]) -> list[Any]:
    members = [member for entry in entries for member in (entry["params"] if isinstance(entry, dict) else [entry])]
    return [member[1] if isinstance(member, tuple) else member for member in members]


def _with_tuples(builder: Callable[..., object], options: Mapping[str, object]) -> dict[str, object]:
    parameters = inspect.signature(builder).parameters
    wanted = {name for name, parameter in parameters.items() if isinstance(parameter.default, tuple)}
    return {
        name: tuple(value) if name in wanted and isinstance(value, list) else value for name, value in options.items()
    }


def _can_fuse(builder: object, entries: Sequence[object], options: Mapping[str, object]) -> bool:
    if builder not in _FUSED or _IMPLEMENTATIONS & options.keys():
        return False
    if any(isinstance(entry, dict) and _IMPLEMENTATIONS & entry.keys() for entry in entries):
        return False
    tensors = _tensors(entries)
    # Not DTensor and other subclasses: they may live on several meshes, which one fused call cannot take.
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point() for tensor in tensors)
    devices = {tensor.device for tensor in tensors} if plain else set()
    return len(devices) == 1 and {device.type for device in devices} <= {"cpu", "cuda"}


def _torch_optimizers() -> dict[str, type[Optimizer]]:
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    return {name.lower(): cls for name, cls in classes if issubclass(cls, Optimizer) and cls is not Optimizer}


OPTIMIZERS = OptimizerRegistry("optimizer", _torch_optimizers())
"""Optimizers by name: `OPTIMIZERS.build(params=model.parameters(), type="adamw", lr=1e-3)`."""
