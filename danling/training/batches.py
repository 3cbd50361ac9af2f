"""Reading a batch by its shape, and what its loss was averaged over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def unpack_batch(data: Any) -> tuple[Any, Any]:
    """Return `(input, target)` of a batch; the target is `None` for a bare input.

    Args:
        data: A mapping with `input` and, optionally, `target`; a sequence `(input, target)`; or the input itself.

    Raises:
        ValueError: If a mapping has no `input`, or a sequence is empty or longer than two.
    """
    if type(data) in (tuple, list) and len(data) == 2:  # by far the most batches; the checks of abstract types are slow
        return data[0], data[1]
    if isinstance(data, Mapping):
        if "input" not in data:
            raise ValueError(
                f"Expected a batch mapping with the keys 'input' and 'target'. Received: keys={sorted(map(str, data))}. "
                "Return these keys from the dataset, or override `train_step` and `evaluate_step`."
            )
        return data["input"], data.get("target")
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        if len(data) == 1:
            return data[0], None
        if len(data) != 2:
            raise ValueError(
                f"Expected a batch of the form (input, target). Received: a sequence of length {len(data)}. "
                "Return two elements from the dataset, or override `train_step` and `evaluate_step`."
            )
        return data[0], data[1]
    return data, None


def peek_target(data: Any) -> Any:
    """Return the target of a batch, or `None` where there is none or the batch has a shape of the user's own."""
    if isinstance(data, (list, tuple)):
        return data[1] if len(data) == 2 else None
    return data.get("target") if isinstance(data, Mapping) else None


def call_model(model: Any, inputs: Any) -> Any:
    """Call `model`; a mapping is passed as keyword arguments."""
    if isinstance(inputs, Tensor) or not isinstance(inputs, Mapping):
        return model(inputs)
    return model(**inputs)


def count_samples(data: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor, else 1."""
    if isinstance(data, (tuple, list)) and data and isinstance(data[0], Tensor):
        data = data[0]
    if isinstance(data, Tensor):
        return data.shape[0] if data.ndim else 1
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        for item in data:
            if isinstance(item, (Tensor, Mapping, Sequence)) and not isinstance(item, (str, bytes)):
                return count_samples(item)
        return len(data)
    return 1


def count_tokens(data: Any) -> int:
    """Return the number of tokens of a batch: the elements of its first integer tensor of two dimensions, 0 without one.

    Args:
        data: The batch; of `(input, target)` and of a mapping with `input`, the input is looked at.
    """
    if isinstance(data, (tuple, list)) and data:
        data = data[0]
    if isinstance(data, Mapping):
        data = data.get("input", data)
    tensors = data.values() if isinstance(data, Mapping) else (data,)
    for value in tensors:
        if (
            isinstance(value, Tensor)
            and value.ndim == 2
            and not (value.is_floating_point() or value.dtype == torch.bool)
        ):
            return value.numel()
    return 0


def criterion_weight(criterion: Any, target: Any, data: Any) -> float | Tensor:
    """Return what a mean-reduced `criterion` averages over.

    `CrossEntropyLoss` and `NLLLoss` divide by the (class-weighted) count of targets other than `ignore_index`
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html); element-wise losses by the number of
    elements; anything else, and a batch without a target tensor, counts samples.

    Args:
        criterion: The loss module or callable, or `None`.
        target: The target of the batch, any type.
        data: The batch, whose samples count where there is no target tensor.

    Returns:
        A float, or a 0-dim tensor on the target's device that has not been waited for.
    """
    if not isinstance(target, Tensor):
        return float(count_samples(data))
    if target.is_floating_point():
        return _dense_weight(criterion, target)
    ignore_index = criterion_setting(criterion, "ignore_index")
    class_weight = criterion_setting(criterion, "weight")
    if isinstance(class_weight, Tensor) and _weighs_classes(criterion):
        return _class_weight(target, class_weight, ignore_index)
    if ignore_index is None:
        return float(target.numel())
    if target.device.type != "cpu":
        return torch.count_nonzero(target != ignore_index)
    # Most batches ignore nothing, and the smallest target tells that in one pass.
    if ignore_index < 0 and target.numel() and target.min().item() > ignore_index:
        return float(target.numel())
    return float(torch.count_nonzero(target != ignore_index).item())


def _dense_weight(criterion: Any, target: Tensor) -> float:
    if (isinstance(criterion, nn.CrossEntropyLoss) or _function(criterion) is F.cross_entropy) and target.ndim > 1:
        return float(target.numel() // target.shape[1])  # class probabilities: one term a position
    if isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean" and target.ndim:
        return float(target.shape[0])
    return float(target.numel())


def _class_weight(target: Tensor, class_weight: Tensor, ignore_index: int | None) -> Tensor:
    weights = class_weight.to(target.device)
    if ignore_index is None:
        return weights[target].sum()
    counts = target != ignore_index
    # Of a fixed shape, so that nobody waits for the device.
    return (weights[target.where(counts, 0)] * counts).sum()


def criterion_setting(criterion: Any, name: str) -> Any:
    """Return an option of a criterion: an attribute of a module, a keyword of a `functools.partial`, or a function's default.

    Args:
        criterion: The loss module or callable, or `None`.
        name: The option, such as `"reduction"`.

    Returns:
        Its value; `None` when there is none.
    """
    if isinstance(criterion, nn.Module) or not callable(criterion):
        return getattr(criterion, name, None)
    if hasattr(criterion, name):
        return getattr(criterion, name)
    if isinstance(criterion, partial) and name in criterion.keywords:
        return criterion.keywords[name]
    return _defaults(_function(criterion)).get(name)


def _function(criterion: Any) -> Any:
    return criterion.func if isinstance(criterion, partial) else criterion


@lru_cache(maxsize=32)
def _defaults(function: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _weighs_classes(criterion: Any) -> bool:
    kinds = (nn.CrossEntropyLoss, nn.NLLLoss)
    other = isinstance(criterion, nn.modules.loss._Loss) and not isinstance(criterion, kinds)
    return not other and _function(criterion) is not F.multi_margin_loss
