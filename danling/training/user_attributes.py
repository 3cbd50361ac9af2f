"""Which attributes, parameters and buffers of a runner are the program's, so that a checkpoint may have to have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from danling.utils.tensors import canonical_name

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner


def declared_names(runner: BaseRunner, what: str) -> set[str]:
    """Return the names in `saved` or `not_saved` of the runner's class and its bases."""
    return {name for kind in type(runner).__mro__ for name in vars(kind).get(what, ())}


def own_attributes(runner: BaseRunner) -> dict[str, object]:
    """Return the attributes of the user's, those of the class among them."""
    left_out = {*runner.library_names, *declared_names(runner, "not_saved"), "saved", "not_saved"}
    # A list on the class is shared state as well: `self.seen.append(x)` changes it without an assignment.
    of_class = {
        name: value
        for kind in reversed(type(runner).__mro__)
        if not kind.__module__.startswith("danling.")
        for name, value in vars(kind).items()
        if not name.startswith("__") and isinstance(value, (list, dict, set))
    }
    return {
        name: value for name, value in {**of_class, **vars(runner)}.items() if name not in left_out
    }


def changeable_attributes(runner: BaseRunner) -> dict[str, object]:
    """Return what a step may change: the attributes of the user's, and the objects and callables in `metrics`."""
    # Not `runner.metrics`: a property of the program's may make new objects each time.
    metrics = vars(runner).get("metrics")
    found: dict[str, object] = {}
    if isinstance(metrics, (Mapping, nn.ModuleDict)):
        found = {f"metrics[{name!r}]": metric for name, metric in metrics.items()}
    elif metrics is not None:
        found = {"metrics": metrics}
    return {**own_attributes(runner), **found}


def named_roots(runner: BaseRunner) -> list[tuple[str, nn.Module]]:
    """Return model and criterion, with what the names of their tensors begin with."""
    # A runner that does not train may have no model, and a criterion may be a function.
    return [
        (at, each)
        for at, each in (("", runner.unwrapped_model), ("criterion.", runner.criterion))
        if isinstance(each, nn.Module)
    ]


def parameters_of(runner: BaseRunner) -> dict[str, nn.Parameter]:
    return {
        f"{at}{canonical_name(name)}": parameter
        for at, module in named_roots(runner)
        for name, parameter in module.named_parameters()
    }


def unsaved_buffers(runner: BaseRunner) -> dict[str, tuple[nn.Module, str]]:
    """Return where the buffers that are not persistent are, by name."""
    return {
        f"{at}{canonical_name(f'{prefix}.{name}'.strip('.'))}": (part, name)
        for at, module in named_roots(runner)
        for prefix, part in module.named_modules()
        for name in sorted(part._non_persistent_buffers_set & part._buffers.keys())
    }
