"""Reading batches and predictions by their shape: input, target, samples, tokens; the loss that a model returns."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""Names under which a target is found in a batch that is a mapping, the first one that is there."""


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


def find_target(data: Mapping[str, object]) -> object:
    """Return the target in a batch, or in the mapping under its key `input`; `None` where neither has one of `TARGET_NAMES`."""
    inner = data.get("input")
    for held in (data, inner if isinstance(inner, Mapping) else {}):
        for name in TARGET_NAMES:
            if name in held:
                return held[name]
    return None


def model_loss(pred: object) -> Tensor | None:
    """Return the `loss` that a model put into its prediction, a mapping or an object; `None` when there is none."""
    found = _parts(pred, "loss")
    return found[0] if found and isinstance(found[0], Tensor) else None


def prediction_of(pred: object) -> object:
    """Return what a criterion and metrics are handed of a prediction: its `logits` where it has `loss` and `logits`, else all of it.

    Args:
        pred: What the model returned. The `loss` may be `None`, as that of a model which was given no labels.
    """
    found = None if isinstance(pred, Tensor) else _parts(pred, "loss", "logits")
    return pred if found is None else found[1]


def _parts(pred: object, *names: str) -> list[Any] | None:
    """Return entries or attributes of a prediction, `None` where it lacks one."""
    held = {name: pred[name] for name in names if name in pred} if isinstance(pred, Mapping) else {}
    held |= {name: getattr(pred, name) for name in names if name not in held and hasattr(pred, name)}
    return [held[name] for name in names] if len(held) == len(names) else None


# Batches of graphs, as torch_geometric makes them: one large graph, of which each sample is a part


def count_graphs(data: Any) -> int | None:
    """Return how many graphs a batch consists of, `None` where it is no batch of graphs."""
    return told_count(data, "num_graphs")


def told_count(data: Any, name: str) -> int | None:
    """Return a number that a batch tells in an attribute, `None` where it has none."""
    try:
        number = getattr(data, name, None)
    except Exception:
        return None
    return number if isinstance(number, int) and not isinstance(number, bool) else None


def target_of_graphs(data: object) -> object:
    """Return the target of a batch of graphs, `None` where it has no attribute out of `TARGET_NAMES`."""
    held = (getattr(data, name, None) for name in TARGET_NAMES)
    return next((found for found in held if found is not None), None)


def keywords_of_graphs(data: Any, forward: object) -> dict[str, object] | None:
    """Return what a model takes of a batch of graphs by name, `None` where it takes the batch itself.

    Models of layers take tensors, as in `forward(self, x, edge_index, batch)`. One with a single required parameter is given the batch,
    whatever that parameter is called.
    """
    takes, required = _graph_parameters(forward)
    held = set(data.keys()) if callable(getattr(data, "keys", None)) else set()
    if len(required) < 2 or not held.issuperset(required):
        return None
    return {name: data[name] for name in takes if name in held}


def nodes_of_graphs(data: Any) -> list[int] | None:
    """Return the number of nodes of each graph of a batch, `None` where it is no batch of graphs."""
    graphs = count_graphs(data)
    if graphs is None:
        return None
    begins = getattr(data, "ptr", None)
    return begins.diff().tolist() if isinstance(begins, Tensor) and begins.ndim == 1 else [0] * graphs


@lru_cache(maxsize=64)
def _graph_parameters(forward: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    if forward is None:
        return (), frozenset()
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return tuple(p.name for p in named), frozenset(p.name for p in named if p.default is p.empty)
