"""Reading a batch by its shape, and what its loss was averaged over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .graphs import count_graphs, keywords_of_graphs, target_of_graphs, told_count
from .targets import IGNORED_LABEL, TARGET_NAMES, counted_labels, find_target, shifts_labels

_ALIGNED = "shift_labels"
"""Labels that a model of transformers is handed shifted already."""


def is_pair(data: Any) -> bool:
    """Whether a batch is a plain `(input, target)`: by far the most are, and the checks of abstract types are slow."""
    return type(data) in (tuple, list) and len(data) == 2


def unpack_batch(data: Any, model: object = None) -> tuple[object, object]:
    """Return `(input, target)` of a batch; the target is `None` for a bare input.

    Args:
        data: A mapping with `input` and, optionally, a target under one of `TARGET_NAMES`; a mapping of the keywords that the model's
            `forward` takes, with or without a target; a sequence `(input, target)`; a batch of graphs; or the input itself.
        model: The model, out of the wrapper of its stack; `None` where it takes no keywords. It is handed the target too where its
            `forward` has a parameter of that name, or takes any keyword.

    Raises:
        ValueError: If a mapping has neither `input` nor the keywords of the model, or a sequence is empty or longer than two.
    """
    if is_pair(data):
        return data[0], data[1]
    if isinstance(data, Mapping):
        if "input" in data:
            return data["input"], find_target(data)
        return {name: data[name] for name in _keywords(_forward_of(model), tuple(data))}, find_target(data)
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        if len(data) == 1:
            return data[0], None
        if len(data) != 2:
            raise ValueError(
                f"Expected a batch of the form (input, target). Received: a sequence of length {len(data)}. "
                "Return two elements from the dataset, or override `train_step` and `evaluate_step`."
            )
        return data[0], data[1]
    if count_graphs(data) is not None:
        keywords = keywords_of_graphs(data, _forward_of(model))
        return (data if keywords is None else keywords), target_of_graphs(data)
    return data, None


def _forward_of(model: object) -> object:
    return getattr(type(model), "forward", None) if model is not None else None


@lru_cache(maxsize=64)
def _keywords(forward: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return which entries of a batch without `input` a model is called with."""
    received = f"keys={sorted(map(str, names))}"
    mend = "Return one or the other from the dataset or its collate function, or override `train_step` and `evaluate_step`."
    if forward is None:
        raise ValueError(f"Expected a batch mapping with the keys 'input' and 'target'. Received: {received}. {mend}")
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return names
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    foreign = sorted(str(name) for name in names if name not in takes and name not in TARGET_NAMES)
    taken = tuple(name for name in names if name in takes)
    if foreign or not taken:
        raise ValueError(
            f"Expected a batch mapping with the keys 'input' and 'target', or with what {forward.__qualname__} takes ({', '.join(takes)}). "
            f"Received: {received}{f', of which it does not take {foreign}' if foreign else ''}. {mend}"
        )
    return taken


def peek_target(data: object) -> object:
    """Return the target of a batch, or `None` where there is none or the batch has a shape of the user's own."""
    if isinstance(data, (list, tuple)):
        return data[1] if len(data) == 2 else None
    if isinstance(data, Mapping):
        return find_target(data)
    return target_of_graphs(data) if count_graphs(data) is not None else None


def not_one_loss(loss: object) -> ValueError:
    """Return the error for a loss that is not a single value."""
    received = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"loss={loss!r}"
    return ValueError(
        f"Expected a loss of one value. Received: {received}. Give the criterion reduction='mean' instead of 'none', or return a 0-dim "
        "tensor from `compute_loss`."
    )


def note_batch(error: Exception, step: str, split: str, data: object) -> None:
    """Add to an error what a step was given, as a note; before Python 3.11 tracebacks do not print notes."""
    of_split = f" on split {split!r}" if split else ""
    vars(error).setdefault("__notes__", []).append(f"{step}{of_split} received {_shapes(data)}")


def _shapes(data: object) -> str:
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')} {tuple(data.shape)} on {data.device}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{name!r}: {_shapes(value)}" for name, value in list(data.items())[:8]) + "}"
    if isinstance(data, (list, tuple)):
        return "(" + ", ".join(map(_shapes, data[:8])) + ")"
    return type(data).__name__


def criterion_loss(criterion: Any, pred: object, target: Any) -> Any:
    """Return `criterion(pred, target)`; where it fails without a target, that is said.

    Args:
        criterion: A callable.
        pred: A prediction.
        target: Its target, `None` without one.

    Raises:
        ValueError: If there is no target and the criterion cannot do without.
    """
    if target is not None:
        return criterion(pred, target)
    try:
        return criterion(pred, target)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            "Expected a batch with a target for the criterion: (input, target), or a mapping with a key 'target'. Received: a batch "
            "without. Return one from the dataset, or override `compute_loss`."
        ) from error


def call_model(model: Any, inputs: object) -> object:
    """Call `model`; a mapping is passed as keyword arguments."""
    if isinstance(inputs, Tensor) or not isinstance(inputs, Mapping):
        return model(inputs)
    return model(**inputs)


def count_samples(data: object) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor, else 1.

    A batch of another library says by itself how many it has: of graphs `num_graphs`, of neighbours that were sampled around some
    nodes `batch_size`, the number of these.
    """
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
            told = _told_samples(item)
            if told is not None:
                return told
        return len(data)
    told = _told_samples(data)
    return 1 if told is None else told


def _told_samples(data: object) -> int | None:
    graphs = count_graphs(data)
    return told_count(data, "batch_size") if graphs is None else graphs


def count_tokens(data: object) -> int:
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


def criterion_weight(criterion: object, target: object, data: object) -> float | Tensor:
    """Return what a mean-reduced `criterion` averages over.

    `CrossEntropyLoss` and `NLLLoss` divide by the (class-weighted) count of targets other than `ignore_index`
    (https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html); element-wise losses by the number of
    elements; your own function or module, the integer targets other than its `ignore_index`, which is -100 where it has none; anything
    else, and a batch without a target tensor, counts samples.

    Args:
        criterion: The loss module or callable, or `None`.
        target: The target of the batch, any type.
        data: The batch, whose samples count where there is no target tensor.

    Returns:
        A float, or a 0-dim tensor on the target's device, which is not synchronized with the host.
    """
    if not isinstance(target, Tensor):
        return float(count_samples(data))
    if target.is_floating_point():
        return _dense_weight(criterion, target)
    if isinstance(criterion, nn.Module):
        ignore_index, class_weight = getattr(criterion, "ignore_index", None), getattr(criterion, "weight", None)
    else:
        ignore_index, class_weight = (criterion_setting(criterion, name) for name in ("ignore_index", "weight"))
    if isinstance(class_weight, Tensor) and _weighs_classes(criterion):
        return _class_weight(target, class_weight, ignore_index)
    if ignore_index is None and _is_of_user(criterion):
        ignore_index = IGNORED_LABEL
    return _count(target, ignore_index)


def model_weight(model: object, target: object, data: object, *, shifts: bool | None = None) -> float | Tensor:
    """Return what the mean-reduced loss that a model computes itself is averaged over.

    Integer labels other than -100 count, as in `torch.nn.functional.cross_entropy`; of a model that shifts its labels, those of
    `labels[:, 1:]`; see `danling.training.shifts_labels`. Of labels in floating point all elements count, and without labels the
    samples. Where the batch has `shift_labels`, which models of transformers take in the place of `labels`, these count as they are.

    Args:
        model: The model, out of the wrapper of its stack.
        target: The labels of the batch, any type.
        data: The batch, whose samples count where there is no tensor of labels.
        shifts: Whether the model shifts its labels; `None` is what its class tells.

    Returns:
        A float, or a 0-dim tensor on the device of the labels, which is not synchronized with the host.
    """
    aligned = aligned_labels(data)
    if aligned is not None:
        return _count(aligned, IGNORED_LABEL)
    if not isinstance(target, Tensor):
        return float(count_samples(data))
    if target.is_floating_point():
        return float(target.numel())
    shifted = counted_labels(target, shifts=bool(shifts_labels(model) if shifts is None else shifts))
    return _count(shifted, IGNORED_LABEL)


def aligned_labels(data: object) -> Tensor | None:
    """Return the labels that a batch has shifted already, itself or in the mapping under its key `input`; `None` where it has none."""
    for _ in range(2):
        if isinstance(data, Mapping):
            aligned = data.get(_ALIGNED)
            if isinstance(aligned, Tensor):
                return aligned
            data = data.get("input")
    return None


def _is_of_user(criterion: object) -> bool:
    """Whether a criterion is not torch's, so that nothing but a convention says which integer targets it leaves out."""
    kind = type(criterion) if isinstance(criterion, nn.Module) else _function(criterion)
    return not getattr(kind, "__module__", "torch").startswith("torch.")


def _count(target: Tensor, ignore_index: int | None) -> float | Tensor:
    if ignore_index is None:
        return float(target.numel())
    if target.device.type != "cpu":
        return torch.count_nonzero(target != ignore_index)
    # Most batches ignore nothing, and the smallest target tells that in one pass.
    if ignore_index < 0 and target.numel() and target.min().item() > ignore_index:
        return float(target.numel())
    return float(torch.count_nonzero(target != ignore_index).item())


def _dense_weight(criterion: object, target: Tensor) -> float:
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
    # A fixed shape needs no synchronization with the device.
    return (weights[target.where(counts, 0)] * counts).sum()


def criterion_setting(criterion: object, name: str) -> object:
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


def _function(criterion: object) -> object:
    return criterion.func if isinstance(criterion, partial) else criterion


@lru_cache(maxsize=32)
def _defaults(function: Any) -> dict[str, object]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def _weighs_classes(criterion: object) -> bool:
    kinds = (nn.CrossEntropyLoss, nn.NLLLoss)
    other = isinstance(criterion, nn.modules.loss._Loss) and not isinstance(criterion, kinds)
    return not other and _function(criterion) is not F.multi_margin_loss
