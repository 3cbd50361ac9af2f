"""Optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .registry import Registry

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class OptimizerRegistry(Registry):
    """Every optimizer of `torch.optim` by its lower-case name, and what users register."""

    def build(self, params: Any, type: str, **options: Any) -> Any:
        """Build an optimizer.

        The fused implementation is chosen where torch has one for the parameters' device and neither `fused` nor `foreach` is
        given; its results differ from the others by rounding only.

        Args:
            params: Parameters, or parameter groups.
            type: Its name.
            **options: Its arguments, such as `lr`.

        Raises:
            ValueError: If the name or an option is unknown, or there is nothing to train.
        """
        self.check_options(type, options)
        params = list(params)
        if not _flat(params):
            raise ValueError(
                f"Expected at least one parameter that requires a gradient for optimizer {type!r}. Received: none. Unfreeze a layer."
            )
        builder = self.lookup(type)
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        if _can_fuse(builder, params, options):
            options["fused"] = True
        return builder(params, **options)


def _flat(params: Iterable[Any]) -> list[Tensor]:
    return [tensor for entry in params for tensor in (entry["params"] if isinstance(entry, dict) else [entry])]


def _can_fuse(builder: Any, params: list[Any], options: dict[str, Any]) -> bool:
    name = getattr(builder, "__name__", "")
    if name not in _FUSED or getattr(torch.optim, name, None) is not builder:
        return False
    if {"fused", "foreach", "differentiable", "capturable"} & options.keys():
        return False
    tensors = _flat(params)
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point() for tensor in tensors)
    devices = {tensor.device.type for tensor in tensors}
    return plain and len(devices) == 1 and devices <= {"cpu", "cuda"}


def _torch_optimizers() -> dict[str, Any]:
    classes = inspect.getmembers(torch.optim, inspect.isclass)
    return {name.lower(): cls for name, cls in classes if issubclass(cls, Optimizer) and cls is not Optimizer}


OPTIMIZERS = OptimizerRegistry("optimizer", _torch_optimizers())
"""Optimizers by name: `OPTIMIZERS.build(params=model.parameters(), type="adamw", lr=1e-3)`."""
