"""What a batch contains: input, target, labels and tokens; and what a step, a model and a criterion are given and return."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from danling.utils.tensors import shapes_of

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""Names under which a target is found in a batch that is a mapping, the first one that is there."""

IGNORED_LABEL = -100
"""The label that a model leaves out of the loss that it computes itself: the default of `torch.nn.functional.cross_entropy`."""


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
    forward = getattr(type(model), "forward", None) if model is not None else None
    if isinstance(data, Mapping):
        if "input" in data:
            return data["input"], peek_target(data)
        return {name: data[name] for name in _keywords(forward, tuple(data))}, peek_target(data)
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        if len(data) not in (1, 2):
            raise ValueError(
                f"Expected a batch of the form (input, target). Received: a sequence of length {len(data)}. "
                "Return two elements from the dataset, or override `train_step` and `evaluate_step`."
            )
        return data[0], data[1] if len(data) == 2 else None
    if told_count(data, "num_graphs") is not None and forward is not None:
        # Models of layers take tensors, as in `forward(self, x, edge_index, batch)`. One with a single required parameter is given the
        # batch, whatever that parameter is called.
        takes, required, _ = _parameters(forward)
        held = set(data.keys()) if callable(getattr(data, "keys", None)) else set()
        if len(required) > 1 and held.issuperset(required):
            return {name: data[name] for name in takes if name in held}, peek_target(data)
    return data, peek_target(data)


@lru_cache(maxsize=64)
def _keywords(forward: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return which entries of a batch without `input` a model is called with."""
    takes, _, takes_any = _parameters(forward) if forward is not None else ((), (), False)
    if takes_any:
        return names
    taken = tuple(name for name in names if name in takes)
    foreign = sorted(str(name) for name in names if name not in takes and name not in TARGET_NAMES)
    if foreign or not taken:
        or_taken = (
            f", or with what {forward.__qualname__} takes ({', '.join(takes)})"
            if forward is not None
            else ""
        )
        raise ValueError(
            f"Expected a batch mapping with the keys 'input' and 'target'{or_taken}. Received: keys={sorted(map(str, names))}"
            f"{f', of which it does not take {foreign}' if foreign and or_taken else ''}. Return one or the other from the dataset or its "
            "collate function, or override `train_step` and `evaluate_step`."
        )
    return taken


@lru_cache(maxsize=64)
def _parameters(forward: Any) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the names of a method's parameters, those without a default, and whether it takes any keyword."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in named if p.default is p.empty)
    return tuple(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters)


def peek_target(data: object) -> object:
    """Return the target of a batch, or `None` where there is none or the batch has a shape of the user's own."""
    if isinstance(data, (list, tuple)):
        return data[1] if len(data) == 2 else None
    if isinstance(data, Mapping):
        inner = data.get("input")
        for held in (data, inner if isinstance(inner, Mapping) else {}):
            for name in TARGET_NAMES:
                if name in held:
                    return held[name]
    elif told_count(data, "num_graphs") is not None:
        found = (getattr(data, name, None) for name in TARGET_NAMES)
        return next((target for target in found if target is not None), None)
    return None


def not_one_loss(loss: object) -> ValueError:
    """Return the error for a loss that is not a single value."""
    fix = "Return a 0-dim tensor with a gradient from the criterion or from `compute_loss`."
    if isinstance(loss, Tensor):
        received = f"shape {tuple(loss.shape)}"
        fix = "Give the criterion reduction='mean' instead of 'none', or return a 0-dim tensor from `compute_loss`."
    elif isinstance(loss, Mapping):
        received = f"a {type(loss).__name__} with the keys {[str(key) for key in loss]}"
        fix = "Override `compute_loss` to return the sum that is trained on, and add the parts to `self.meters`."
    elif isinstance(loss, (tuple, list)):
        received = f"a {type(loss).__name__} of {len(loss)}"
        fix = "Override `compute_loss` to return the one that is trained on, and add the others to `self.meters`."
    else:
        received = f"loss={loss!r}"
    return ValueError(f"Expected a loss of one value. Received: {received}. {fix}")


def check_returned(returned: object, step: str) -> None:
    """Refuse what a step returned in the place of prediction and loss."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        received = (
            f"{len(returned)} values"
            if isinstance(returned, (tuple, list))
            else type(returned).__name__
        )
        raise ValueError(
            f"Expected `{step}` to return the prediction and the loss, each of which may be None. Received: {received}. End it with "
            "`return pred, loss`."
        )


def note_batch(error: Exception, step: str, split: str, data: object) -> None:
    """Add to an error what a step was given, as a note."""
    of_split = f" on split {split!r}" if split else ""
    error.add_note(f"{step}{of_split} received {shapes_of(data)}")
    if isinstance(error, TypeError) and f"{step}() missing" in str(error):
        error.add_note(
            f"The library calls {step}(batch): take the batch apart in it. The number of the update is self.train_state.global_step."
        )
    if "through the graph a second time" in str(error):
        error.add_note(
            "If a step keeps a tensor for the next batch, such as a hidden state, detach it: self.hidden = hidden.detach(). What is in "
            "self.carry is detached between the batches. Of several losses of one forward, give their sum to self.backward."
        )


def criterion_loss(criterion: Any, pred: object, target: Any) -> Any:
    """Return `criterion(pred, target)`; where it fails for want of a target or of a parameter, the error names that.

    Args:
        criterion: A callable.
        pred: A prediction.
        target: Its target, `None` without one.

    Raises:
        ValueError: If there is no target and the criterion cannot do without.
    """
    try:
        return criterion(pred, target)
    except (TypeError, AttributeError, RuntimeError) as error:
        signature = _signature_without_target(criterion)
        if signature is not None:
            note = f"The criterion is called as criterion(prediction, target). Received: one that is defined as {signature}."
            error.add_note(f"{note} Give it both parameters, or override `compute_loss`.")
            raise
        if target is not None:
            raise
        raise ValueError(
            "Expected a batch with a target for the criterion: (input, target), or a mapping with a key 'target'. Received: a batch "
            "without. Return one from the dataset, which for an autoencoder is the input again, or override `compute_loss`."
        ) from error


def _signature_without_target(criterion: Any) -> str | None:
    """Return the signature of a criterion that cannot take a prediction and a target, `None` if it can."""
    called = criterion.forward if isinstance(criterion, nn.Module) else criterion
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(None, None)
    except TypeError:
        return str(signature)
    return None


def call_model(model: Any, inputs: object) -> object:
    """Call `model`; a mapping is passed as keyword arguments."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    try:
        return model(inputs)
    except TypeError as error:
        if "missing" in str(error) and isinstance(inputs, (tuple, list)):
            error.add_note(
                f"The model was called with one argument, a {type(inputs).__name__} of {len(inputs)}. The entries of a mapping are passed "
                "as keyword arguments: make the input one, with the names that forward has."
            )
        raise


def count_tokens(data: object) -> int:
    """Return the number of tokens of a batch: the elements of its first integer tensor of two dimensions, 0 without one.

    Args:
        data: The batch; of `(input, target)` and of a mapping with `input`, the input is looked at.
    """
    if isinstance(data, (tuple, list)) and data:
        data = data[0]
    if isinstance(data, Tensor):
        if data.is_floating_point():  # as most are
            return 0
        return _tokens_of(data) or 0
    if isinstance(data, Mapping):
        data = data.get("input", data)
    values = data.values() if isinstance(data, Mapping) else (data,)
    counts = (_tokens_of(value) for value in values if isinstance(value, Tensor))
    return next((count for count in counts if count is not None), 0)


def _tokens_of(input: Tensor) -> int | None:
    """Return the elements of a tensor that holds tokens, `None` of another one."""
    if (
        input.ndim != 2
        or input.is_floating_point()
        or input.is_complex()
        or input.dtype == torch.bool
    ):
        return None
    return input.numel()


def model_loss(pred: object) -> Tensor | None:
    """Return the `loss` that a model put into its prediction, a mapping or an object; `None` when there is none."""
    loss = pred.get("loss") if isinstance(pred, Mapping) else getattr(pred, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def prediction_of(pred: object) -> object:
    """Return what a criterion and metrics are handed of a prediction: its `logits` where it has `loss` and `logits`, else all of it.

    Args:
        pred: What the model returned. The `loss` may be `None`, as that of a model which was given no labels.
    """
    if isinstance(pred, Tensor):
        return pred
    if isinstance(pred, Mapping) and "loss" in pred and "logits" in pred:
        return pred["logits"]
    return pred.logits if hasattr(pred, "loss") and hasattr(pred, "logits") else pred


def told_count(data: object, *names: str) -> int | None:
    """Return the first number that a batch, as of torch_geometric, tells in an attribute of these names; `None` where it has none."""
    for name in names:
        with suppress(Exception):
            number = getattr(data, name, None)
            if isinstance(number, int) and not isinstance(number, bool):
                return number
    return None


def nodes_of_graphs(data: object) -> list[int] | None:
    """Return the number of nodes of each graph of a batch, `None` where it is no batch of graphs."""
    graphs = told_count(data, "num_graphs")
    if graphs is None:
        return None
    begins = getattr(data, "ptr", None)
    return (
        begins.diff().tolist() if isinstance(begins, Tensor) and begins.ndim == 1 else [0] * graphs
    )


def aligned_labels(data: object) -> Tensor | None:
    """Return the labels that a batch has shifted already, itself or in the mapping under its key `input`; `None` where it has none."""
    for _ in range(2):
        if isinstance(data, Mapping):
            aligned = data.get("shift_labels")
            if isinstance(aligned, Tensor):
                return aligned
            data = data.get("input")
    return None


def align_labels(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with `shift_labels`: at each position the label of the next one, so that its sequences can be cut anywhere.

    The labels are those of the batch, or of the mapping under its key `input`; without any, or where they are shifted already, the batch
    stays as it is.
    """
    found = dict(data)
    inner = found.get("input")
    if isinstance(inner, Mapping):
        found["input"] = align_labels(inner)
    labels = found.get("labels")
    if "shift_labels" not in found and isinstance(labels, Tensor) and labels.ndim > 1:
        found["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return found


def takes_aligned_labels(model: Any) -> bool:
    """Return whether a model computes its loss of `shift_labels` where it is given them.

    Its `forward` has a parameter of that name, or hands any keyword on to the `loss_function` of transformers.
    """
    takes, _, takes_any = _parameters(type(model).forward)
    hands_on = (
        takes_any
        and hasattr(model, "loss_function")
        and getattr(model, "accepts_loss_kwargs", True)
    )
    return "shift_labels" in takes or bool(hands_on)


def returned_loss(pred: object) -> Tensor:
    """Return the loss that the model put into its prediction.

    Raises:
        ValueError: If there is none.
    """
    found = model_loss(pred)
    if found is None:
        raise ValueError(
            f"Expected a criterion, or a model that returns a loss. Received: criterion=None and a prediction of type "
            f"{type(pred).__name__}. Assign `self.criterion`, or override `compute_loss`."
        )
    return found
