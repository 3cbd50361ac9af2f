"""What a batch contains: input, target, samples and tokens; what it weighs, and which batches have a loss."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from danling.data import PLACEHOLDER, Batch
from danling.data.collation import collate
from danling.data.run_data import RunData
from danling.utils.hooks import is_overridden
from danling.utils.tensors import WIDE_UNSIGNED, as_signed, shapes_of

from .keys import preserved_streams

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""Names under which a target is found in a batch that is a mapping, the first one that is there."""

_LABELS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *WIDE_UNSIGNED)


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
        or_taken = f", or with what {forward.__qualname__} takes ({', '.join(takes)})" if forward is not None else ""
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
        received = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else type(returned).__name__
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


def count_samples(data: object) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor, which may be in a field of a dataclass; else 1.

    A list within the batch whose tensors have other first dimensions has a sample in each tensor.

    A batch of another library says by itself how many it has: of graphs `num_graphs`, of neighbours that were sampled around some
    nodes `batch_size`, the number of these.
    """
    samples = countable_samples(data)
    return 1 if samples is None else samples


def countable_samples(data: object, read: int | None = None, others: Iterable[object] | None = None) -> int | None:
    """Return the number of samples of a batch as `count_samples` does; `None` for an object in which they cannot be counted.

    Args:
        data: The batch, or a part of it.
        read: How many samples the loader has read for the batch; `None` where it does not know.
        others: The other parts of the batch, where `data` is a part of it.
    """
    if isinstance(data, (tuple, list)) and data and isinstance(data[0], Tensor):
        if _are_samples(data, read, others):
            return len(data)
        data = data[0]
    if isinstance(data, Tensor):
        return data.shape[0] if data.ndim else 1
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        for item in data:
            if isinstance(item, (Tensor, Mapping, Sequence)) and not isinstance(item, (str, bytes)):
                return countable_samples(item, read, others=data)
            told = told_count(item, "num_graphs", "batch_size")
            if told is not None:
                return told
        return len(data)
    told = told_count(data, "num_graphs", "batch_size")
    if told is not None:
        return told
    if is_dataclass(data) and not isinstance(data, type):
        values = [getattr(data, field.name, None) for field in fields(data)]
        for value in values:
            is_container = isinstance(value, (Tensor, Mapping, Sequence)) or is_dataclass(value)
            if is_container and not isinstance(value, (str, bytes, type)):
                return countable_samples(value, read, others=values)
    return None


def _are_samples(items: Sequence[object], read: int | None, others: Iterable[object] | None) -> bool:
    """Whether a list of tensors has a sample in each, as `tuple(zip(*samples))` makes it, and is not columns with a row for each sample.

    Tensors of other lengths than each other, or than those in another list of the batch, are no columns. The entries of a batch itself,
    such as input and target, are samples only where the loader has read as many.
    """
    lists = [items, *(each for each in others or () if isinstance(each, (tuple, list)) and len(each) == len(items))]
    rows = [_rows(item) for each in lists for item in each if isinstance(item, (Tensor, Mapping))]
    differ = len(set(rows)) > 1
    if len(items) == read:
        return differ or others is not None
    return differ and others is not None and rows[0] != read


def _rows(item: object) -> int | None:
    return item.shape[0] if isinstance(item, Tensor) and item.ndim else None


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
    if input.ndim != 2 or input.is_floating_point() or input.is_complex() or input.dtype == torch.bool:
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
    return begins.diff().tolist() if isinstance(begins, Tensor) and begins.ndim == 1 else [0] * graphs


# The weight of a batch

IGNORED_LABEL = -100
"""The label that a model leaves out of the loss that it computes itself: the default of `torch.nn.functional.cross_entropy`."""

_FEW_TARGETS = 64
_MISSING = object()

_SHIFTING = ("ForCausalLM", "LMHeadModel")
_SHIFTING_DECODERS = ("ForConditionalGeneration",)
_NOT_SHIFTING = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
_UNSHIFTED = frozenset(
    {
        *(
            f"{name}ForCausalLM"
            for name in ("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart")
        ),
        *(f"{name}ForCausalLM" for name in ("Marian", "Musicgen", "MusicgenMelody", "Mvp", "PLBart", "Pegasus")),
        *(f"{name}ForCausalLM" for name in ("TrOCR", "Whisper")),
        *(f"{name}LMHeadModel" for name in ("XLNet", "FlaubertWith", "XLMWith")),
    }
)
"""Classes of transformers 5.23 that are named like those that shift their labels and do not."""


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
    ignore_index: Any
    kind: object
    if type(criterion) is FunctionType and not vars(criterion):
        kind, defaults = criterion, _defaults(criterion)
        ignore_index, class_weight = defaults.get("ignore_index"), defaults.get("weight")
    else:
        kind = type(criterion) if isinstance(criterion, nn.Module) else _function(criterion)
        ignore_index, class_weight = (
            criterion_setting(criterion, "ignore_index"),
            criterion_setting(criterion, "weight"),
        )
    # The matrix of a metric-learning loss, and learned weights of several losses, are called `weight` too.
    if isinstance(class_weight, Tensor) and class_weight.ndim == 1 and not class_weight.requires_grad:
        other = isinstance(criterion, nn.modules.loss._Loss) and not isinstance(
            criterion, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        if not other and kind is not F.multi_margin_loss:
            return _class_weight(target, class_weight, ignore_index)
    if ignore_index is None and not getattr(kind, "__module__", "torch").startswith("torch."):
        # Nothing but a convention says which targets a criterion of the user's leaves out.
        ignore_index = IGNORED_LABEL
    return _count(target, ignore_index)


def smooths_without_weight(criterion: object) -> bool:
    """Return whether a criterion has a loss for targets that weigh nothing: the smoothed part of a cross entropy, of classes of weight 0.

    It divides that part by the weight of the targets as well, which may be 0 for a micro-batch, so that its loss is infinite.
    """
    if not (isinstance(criterion, nn.CrossEntropyLoss) or _function(criterion) is F.cross_entropy):
        return False
    weight, smoothing = criterion_setting(criterion, "weight"), criterion_setting(criterion, "label_smoothing")
    is_mean = criterion_setting(criterion, "reduction") == "mean"
    return is_mean and bool(smoothing) and isinstance(weight, Tensor) and bool((weight == 0.0).any())


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
    shifts = bool(shifts_labels(model) if shifts is None else shifts)
    # The first label of each sequence has no position before it.
    return _count(target[:, 1:] if target.ndim > 1 and shifts else target, IGNORED_LABEL)


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
    hands_on = takes_any and hasattr(model, "loss_function") and getattr(model, "accepts_loss_kwargs", True)
    return "shift_labels" in takes or bool(hands_on)


def _count(target: Tensor, ignore_index: int | None) -> float | Tensor:
    if ignore_index is None:
        return float(target.numel())
    size = target.numel()
    if type(target) is Tensor and target.is_cpu and target.ndim == 1 and size <= _FEW_TARGETS:
        # As Python's integers, which is quicker than any operation of torch on so few.
        return float(size - target.tolist().count(ignore_index))
    target = as_signed(target)
    if not target.is_cpu:
        return torch.count_nonzero(target != ignore_index)
    # Most batches ignore nothing, and the smallest target tells that in one pass.
    if ignore_index < 0 and size and target.min().item() > ignore_index:
        return float(size)
    return float(torch.count_nonzero(target != ignore_index).item())


def _dense_weight(criterion: object, target: Tensor) -> float:
    if (isinstance(criterion, nn.CrossEntropyLoss) or _function(criterion) is F.cross_entropy) and target.ndim > 1:
        return float(target.numel() // target.shape[1])  # class probabilities: one term a position
    if isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean" and target.ndim:
        return float(target.shape[0])
    return float(target.numel())


def _class_weight(target: Tensor, class_weight: Tensor, ignore_index: int | None) -> Tensor:
    weights, target = class_weight.to(target.device), target.long()  # an index of uint8 would be a mask
    if ignore_index is None:
        return weights[target].sum()
    counts = target != ignore_index
    # A fixed shape needs no synchronization with the device.
    return (weights[target.where(counts, 0)] * counts).sum()


def criterion_setting(criterion: object, name: str) -> object:
    """Return an option of a criterion: an attribute of a module, a keyword of a `functools.partial`, or a function's default.

    Returns:
        Its value; `None` when there is none.
    """
    found: object = getattr(criterion, name, _MISSING)
    if found is not _MISSING:
        return found
    if isinstance(criterion, nn.Module) or not callable(criterion):
        return None
    if isinstance(criterion, partial) and name in criterion.keywords:
        return criterion.keywords[name]
    called: Any = _function(criterion)
    if not (isinstance(called, type) or inspect.isroutine(called)):
        called = called.__call__  # the object may have no hash, as that of a dataclass
    return _defaults(called).get(name)


def _function(criterion: object) -> object:
    return criterion.func if isinstance(criterion, partial) else criterion


@lru_cache(maxsize=32)
def _defaults(function: Any) -> dict[str, object]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}


def shifts_labels(model: object) -> bool | None:
    """Return whether a model shifts the labels of the loss that it returns, `None` where neither attribute nor class tells.

    An attribute `shifts_labels` of the model decides. Else it is told by the name of the class, as transformers gives it: those
    that end with `ForCausalLM` or `LMHeadModel` shift, and those that end with `ForConditionalGeneration` unless their
    `config.is_encoder_decoder` is set; those that end with `ForMaskedLM`, `ForTokenClassification` or `ForSequenceClassification` do
    not. A subclass is what its parent is, and a module around a single other one, such as that of `torch.compile` or of an adapter, is
    what that one is.

    Args:
        model: The model, out of the wrapper of its stack.
    """
    module: Any = model
    while True:
        told = getattr(module, "shifts_labels", None)
        if isinstance(told, bool):
            return told
        kind = _kind(module.__class__)
        if kind == "decoder":
            return not getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        if kind is not None:
            return kind == "shifting"
        inner = list(module.children()) if isinstance(module, nn.Module) else []
        if len(inner) != 1:
            return None
        module = inner[0]


@lru_cache(maxsize=256)
def _kind(model_class: type) -> str | None:
    for parent in model_class.__mro__:
        name = parent.__name__
        if name in _UNSHIFTED:
            return "unshifted"
        if name.endswith(_SHIFTING):
            return "shifting"
        if name.endswith(_NOT_SHIFTING):
            return "unshifted"
        if name.endswith(_SHIFTING_DECODERS):
            return "decoder"
    return None


class BatchLoss:
    """Weighs batches, and knows which of them have a loss.

    Attributes:
        targetless: Whether the batches to train on have no target; `None` before one was seen. A checkpoint stores it under the key `bare`.
        own_loss: Whether `compute_loss` is overridden.
    """

    def __init__(self, runner: TorchRunner, data: RunData) -> None:
        self.targetless: bool | None = None
        self.own_loss = is_overridden(runner, "compute_loss")
        self._runner = runner
        self._data = data
        # A step of the user's own takes batches apart in its own way.
        self._learns = not is_overridden(runner, "train_step")
        self._own_weight = is_overridden(runner, "batch_weight")
        self._warns = runner.is_main_process and not self._own_weight

    @property
    def sums(self) -> bool:
        """Whether the criterion sums instead of averaging, so that its gradient is not divided."""
        return criterion_setting(self._runner.criterion, "reduction") == "sum"

    @property
    def may_divide_by_zero(self) -> bool:
        """Whether the mean over no target at all may have a gradient of NaN: not that of torch's criterions without class weights."""
        criterion = self._runner.criterion
        own = self.own_loss or is_overridden(self._runner, "train_step")
        plain = criterion is None or type(criterion) in (nn.CrossEntropyLoss, nn.NLLLoss)
        return own or not plain or criterion_setting(criterion, "weight") is not None

    def weigh(self, batch: Batch, data: Any, *, training: bool = False) -> tuple[float | Tensor, float]:
        """Return the weight and the number of samples of a batch; both are 0 for padding and for data that only other ranks read.

        Args:
            batch: The batch as its source gave it.
            data: Its data, on the device.
            training: Whether the batch is trained on.
        """
        if batch.samples == 0 or data is PLACEHOLDER:
            return 0.0, 0.0
        samples = count_samples(data) if batch.samples is None else batch.samples
        is_plain_pair = type(data) in (tuple, list) and len(data) == 2
        target = data[1] if is_plain_pair else peek_target(data)
        if training and self.targetless is None and self._learns:
            self.targetless = target is None
        if training and target is None and self._warns:
            self._warns = False
            if criterion_setting(self._runner.criterion, "ignore_index") is not None:
                logger.warning(
                    "Expected a target in each batch, by which its loss is weighed. Received: %s. Its samples are counted instead, which "
                    "is another gradient where the loss is averaged over something else, such as targets or sample weights. Call the "
                    "target one of %s, or override `batch_weight(data, target)`.",
                    shapes_of(data),
                    ", ".join(TARGET_NAMES),
                )
        if batch.samples is not None and self._counts_samples(data, target):
            counted = countable_samples(data, batch.samples)
            # Of an object of the user's, only the loader knows how many samples it has.
            return float(batch.samples if counted is None else counted), samples
        return self._runner.batch_weight(data, target), samples

    def _counts_samples(self, data: object, target: object) -> bool:
        """Whether a batch weighs its samples."""
        if self._own_weight or isinstance(target, Tensor):
            return False
        return self._runner.criterion is not None or aligned_labels(data) is None

    def weight_of_model(self, data: object, target: object) -> float | Tensor:
        """Return what the loss that the model computes is averaged over."""
        runner = self._runner
        shifts = shifts_labels(runner.unwrapped_model) if runner.shifts_labels is None else runner.shifts_labels
        of_positions = isinstance(target, Tensor) and target.ndim == 2 and target.dtype in _LABELS
        if shifts is None and not self.own_loss and of_positions and aligned_labels(data) is None:
            ranks = max(runner.placement.data_replicas, runner.placement.metrics.size)
            # Only where the weight of a micro-batch changes the gradient.
            if runner.mode == "train" and (ranks > 1 or runner.accum_steps > 1 or runner.window.count):
                raise ValueError(
                    "Expected to know whether the loss that the model returns compares each position with its own label or with the next "
                    f"one: micro-batches are weighed by the labels that count. Received: a {type(runner.unwrapped_model).__name__}, which "
                    f"does not say, with accum_steps={runner.accum_steps} on {ranks} ranks. Set `shifts_labels` to True or False on the "
                    "runner or the model, or override `batch_weight(data, target)`."
                )
        return model_weight(runner.unwrapped_model, target, data, shifts=bool(shifts))

    def of_evaluated(self, pred: object, target: object) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.
        """
        criterion = self._runner.criterion
        has_loss = self.own_loss or criterion is not None
        if target is None:
            if self.targetless is None:
                self._look_at_first()
            has_loss = self.own_loss if self.targetless is None else self.targetless and has_loss
        if has_loss:
            return self._runner.compute_loss(pred, target)
        return model_loss(pred) if criterion is None else None

    def _look_at_first(self) -> None:
        """Look for a target in the first sample to train on, where its samples are those of its batches; the streams stay as they are."""
        runner = self._runner
        split = next((name for name in runner.train_splits if name in runner.datasets and name in runner.sources), None)
        if split is None or not self._learns:
            return
        options = self._data.settings(split)
        # Files that workers are to open stay closed here, and a dataset may have other keys than positions.
        if runner.sources[split].kind != "position" or options.get("num_workers") or options.get("collate_fn"):
            return
        with preserved_streams(runner.device), suppress(Exception):
            sample = runner.datasets[split][0]
            # A sample of another library's class is made into a batch by that library, and only the batch has a target.
            known = isinstance(sample, (Tensor, Mapping, list, tuple))
            self.targetless = peek_target(sample if known else collate([sample])) is None


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
