"""Whether an update runs code of the user's, which may draw from NumPy's stream or from that of `random`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from types import FunctionType
from typing import TYPE_CHECKING

from torch import Tensor, nn, optim
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import lr_scheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from danling.utils.observers import EVENTS

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_FUNCTIONS = {id(value): value for value in vars(functional).values() if callable(value)}
_OPTIMIZERS = frozenset(value for value in vars(optim).values() if isinstance(value, type))
_SCHEDULERS = frozenset(
    {
        lr_scheduler.ConstantLR,
        lr_scheduler.CosineAnnealingLR,
        lr_scheduler.CosineAnnealingWarmRestarts,
        lr_scheduler.ExponentialLR,
        lr_scheduler.LinearLR,
        lr_scheduler.MultiStepLR,
        lr_scheduler.OneCycleLR,
        lr_scheduler.PolynomialLR,
        lr_scheduler.ReduceLROnPlateau,
        lr_scheduler.StepLR,
        type(None),
    }
)
"""Schedules that take no function of the user's."""


_PACKAGES = frozenset({"torch", "danling", "typing_extensions", *sys.stdlib_module_names})
"""Whose functions, or decorators of functions, classes of torch and the library have."""


def runs_user_code(runner: TorchRunner, called: Iterable[object]) -> bool:
    """Whether an update in a loop of the library may run code of the user's, other than the reading of its batches.

    It does not if all of this is so: model, criterion, optimizer and schedule are of classes of torch, or the criterion is a function of
    `torch.nn.functional`, without hooks, functions and kinds of tensors of the user's in them; the runner overrides no method; only the
    library observes the run; and the run is one of the stack `ddp` on one process, without extensions that an update calls.

    Args:
        runner: The runner.
        called: What else an update calls; `None` for each that the run does not have.
    """
    if (
        runner.stack != "ddp"
        or runner.distributed
        or any(each is not None for each in (*called, runner.compilation))
    ):
        return True
    modules = list(runner.model.modules())
    if isinstance(runner.criterion, nn.Module):
        modules += runner.criterion.modules()
    elif id(runner.criterion) not in _FUNCTIONS:  # it may have no hash
        return True
    observers = list(runner.observers)
    # A method that the program has set on an observer of the library.
    if any(not vars(observer).keys().isdisjoint(EVENTS) for observer in observers):
        return True
    watching = (runner.ema, *observers, *runner.trackers)
    is_known = (
        all(_is_of(type(module), "torch.nn.modules.") for module in modules)
        and type(runner.optimizer) in _OPTIMIZERS
        and (
            type(runner.scheduler) in _SCHEDULERS
            or _is_of(type(runner.scheduler), "danling.optim.warmup")
        )
        and all(each is None or _is_of(each, "danling.") for each in (*watching, *_global_hooks()))
    )
    if not is_known or _overrides_methods(runner) or _is_within_modes():
        return True
    together = (*modules, runner.optimizer, runner.scheduler)
    kinds = {kind for part in together for kind in type(part).__mro__}
    if _has_functions_of_others([vars(functional), *map(vars, kinds)]):
        return True
    return any(map(_holds_functions, together))


def _overrides_methods(runner: TorchRunner) -> bool:
    """Whether a class of the user's, or the runner itself, has another method or property under a name of the library's."""
    own = [
        vars(kind)
        for kind in type(runner).__mro__
        if not kind.__module__.startswith("danling.") and kind is not object
    ]
    known = {*runner.library_names, "__getattr__", "__getattribute__", "__setattr__"}
    found = [value for held in own for name, value in held.items() if name in known]
    found += [value for name, value in vars(runner).items() if hasattr(type(runner), name)]
    return any(
        isinstance(value, (property, cached_property))
        or (callable(value) and not isinstance(value, type))
        for value in found
    )


def _holds_functions(part: object) -> bool:
    """Whether a module, an optimizer or a schedule of torch has hooks, or functions in its attributes, that are not torch's."""
    if any(
        (name.endswith("hooks") and value) or (callable(value) and not _is_of(value, "torch."))
        for name, value in getattr(part, "__dict__", {}).items()
    ):
        return True
    if not isinstance(part, nn.Module):
        return False
    tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
    return any(
        type(each) not in (Tensor, nn.Parameter)
        or each._backward_hooks
        or each._post_accumulate_grad_hooks
        for each in tensors
    )


def _has_functions_of_others(namespaces: Iterable[Mapping[str, object]]) -> bool:
    """Whether a function in classes and a module of torch was replaced by one of the user's."""
    # Inside of a class method or a static method is the function.
    values = (value for namespace in namespaces for value in namespace.values())
    functions = (getattr(value, "__func__", value) for value in values)
    return any(
        function.__globals__["__name__"].partition(".")[0] not in _PACKAGES
        for function in functions
        if isinstance(function, FunctionType)
    )


def _is_within_modes() -> bool:
    """Whether a context is open in which a function of its own runs with each operation, or with each tensor that is kept for backward."""
    of_functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = (*of_functions, *_get_current_dispatch_mode_stack())
    return bool(modes) or _top_saved_tensors_default_hooks(False) is not None


def _global_hooks() -> list[object]:
    of_optimizers: list[object] = [
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]
    # torch keeps hooks of all modules in several places: one object, which is of no package, represents them.
    return [*of_optimizers, object()] if _has_any_global_hook() else of_optimizers  # type: ignore[no-untyped-call]


def _is_of(value: object, package: str) -> bool:
    """Whether a function, with those that it wraps, or the class of an object, is defined in a package."""
    function = getattr(value, "__func__", value)
    while function is not None:
        # What functools.wraps has copied is the module of the wrapped function.
        names = getattr(
            function, "__globals__", {"__name__": getattr(function, "__module__", None)}
        )
        if not str(names["__name__"]).startswith(package):
            return False
        function = getattr(function, "__wrapped__", None)
    return True
