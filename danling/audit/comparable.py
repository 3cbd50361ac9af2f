"""What makes the first updates of a run comparable between layouts: dropout off, batch normalization held, one dtype, the same samples.

Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

_KINDS, _SIZES = ("", "alpha_", "feature_", "feature_alpha_"), ("", "_", "1d", "2d", "3d")
_DROPOUTS = frozenset(f"{kind}dropout{size}" for kind in _KINDS for size in _SIZES)
"""Names of functions whose second argument is a rate of dropout."""


class ComparableCalls(TorchFunctionMode):
    """Looks at all calls of torch while it is entered.

    Rates of dropout are 0. Floating tensors of several dtypes in one call are promoted, as a float32 batch is that meets float64 weights.

    Args:
        dtype: What they are promoted to; `None` leaves them as they are.

    Attributes:
        looks: Whether what is computed now belongs to a gradient.
        eps: Relative precision of the coarsest dtype that something with a gradient was computed in.
        dropped: Whether a call had a rate of dropout.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self.looks = False
        self.eps = 0.0
        self.dropped = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make one call."""
        name, arguments, named = getattr(func, "__name__", ""), list(args), dict(kwargs or {})
        if "dropout" in name or "dropout_p" in named or name == "scaled_dot_product_attention":
            self._without_dropout(name, arguments, named)
        if self._dtype is not None and "out" not in named and not _writes(name):
            self._promote(arguments, named)
        result = func(*arguments, **named)
        if self.looks:
            self._look(result)
        return result

    def _without_dropout(self, name: str, arguments: list[Any], named: dict[str, Any]) -> None:
        place, key = (4, "dropout_p") if name not in _DROPOUTS else (1, "p")
        rate = arguments[place] if len(arguments) > place else named.get(key, 0.5 if key == "p" else 0.0)
        if not isinstance(rate, float) or rate == 0:
            return
        trains = arguments[2] if key == "p" and len(arguments) > 2 else named.get("training", named.get("train", True))
        self.dropped |= bool(trains)
        if len(arguments) > place:
            arguments[place] = 0.0
        else:
            named[key] = 0.0

    def _promote(self, arguments: list[Any], named: dict[str, Any]) -> None:
        """Cast the floating tensors of a call, where one of them has the dtype and another has not."""
        found = {each.dtype for each in _tensors([*arguments, *named.values()]) if each.is_floating_point()}
        if len(found) < 2 or self._dtype not in found:
            return
        dtype = self._dtype
        arguments[:] = [_cast(each, dtype) for each in arguments]
        named.update({key: _cast(each, dtype) for key, each in named.items()})

    def _look(self, result: Any) -> None:
        for each in _tensors(result if isinstance(result, (list, tuple)) else (result,)):
            if each.requires_grad and each.is_floating_point():
                self.eps = max(self.eps, torch.finfo(each.dtype).eps)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists and tuples among them."""
    found = []
    for value in values:
        inner = value if isinstance(value, (list, tuple)) else (value,)
        found += [each for each in inner if isinstance(each, Tensor)]
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return type(value)(_cast(each, dtype) for each in value) if type(value) in (list, tuple) else value


def _writes(name: str) -> bool:
    """Whether a function writes to its first argument, by its name: `add_`, `__iadd__`, `__setitem__`, `__set__`."""
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))


def hold_batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules of batch normalization that can do without the statistics of a batch: they have running ones.

    Args:
        model: The model.
    """
    return [each for each in model.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]


def switch_dropout_off(module: nn.Module) -> int:
    """Set the rates of dropout of a module and those below it to 0; return how many modules had one.

    Rates are floats in (0, 1) in attributes with `drop` in their names, and `p` of torch's own modules.

    Args:
        module: The module.
    """
    found = 0
    for each in module.modules():
        own = isinstance(each, nn.modules.dropout._DropoutNd)
        rates = [
            name
            for name, value in vars(each).items()
            if type(value) is float and 0 < value < 1 and ("drop" in name.lower() or (own and name == "p"))
        ]
        for name in rates:
            setattr(each, name, 0.0)
        found += bool(rates)
    return found


def cast_loose_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating tensors that modules have as attributes of their own, which are neither parameters nor buffers.

    Args:
        module: The module, with those below it.
        dtype: The dtype.
    """
    for each in module.modules():
        for name, value in list(vars(each).items()):
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(each, name, value.to(dtype))


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating tensors in another dtype: those in mappings, lists, tuples, and objects with `apply`.

    Args:
        value: The batch.
        dtype: The dtype.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {key: cast_floating(item, dtype) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        cast = [cast_floating(item, dtype) for item in value]
        return type(value)(*cast) if hasattr(value, "_fields") else type(value)(cast)
    if callable(getattr(value, "apply", None)) and not isinstance(value, type):
        return value.apply(lambda item: cast_floating(item, dtype))
    return value


def divided_batch(
    settings: Mapping[str, Any],
    *,
    accum_steps: int,
    samples: int | None,
    replicas: int,
    alone: bool,
    divides_itself: bool,
) -> Mapping[str, Any]:
    """Return the settings of a split to train on by which its updates have the same samples on every layout, in shares that differ.

    Where all ranks have equally many samples a wrong divisor does not show.

    Args:
        settings: Of the split.
        accum_steps: Micro-batches of an update that is not divided.
        samples: Of an update; `None` takes those that the settings say, less one where they would be divided evenly.
        replicas: Ranks that read different samples on the layout; 1 leaves the settings as they are.
        alone: Whether this is one process rather than the layout.
        divides_itself: Whether the data is divided over the ranks by a sampler or an iterable of the user's, in batches of even size.
    """
    batch = settings.get("batch_size")
    if replicas == 1 and samples is None:
        return settings
    if divides_itself:
        if batch is None:
            return settings
        whole = batch if samples is None else max(samples // accum_steps, 1)
        share = max(whole // replicas, 1)
        return {**settings, "batch_size": share * replicas if alone else share}
    if samples is None:
        samples = settings.get("global_batch_size") or int(batch or 1) * accum_steps
        samples = max(samples, replicas + 1)
        samples -= samples % replicas == 0
    kept = {name: value for name, value in settings.items() if name not in ("batch_size", "micro_batch_size")}
    return {**kept, "global_batch_size": samples}
