"""What a batch weighs in an update, what its criterion or its model averages over, and which batches have a loss."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from contextlib import suppress
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

from .batches import (
    IGNORED_LABEL,
    TARGET_NAMES,
    aligned_labels,
    model_loss,
    peek_target,
)
from .keys import preserved_streams
from .sample_count import count_samples, find_samples, lengths_of

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_LABELS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *WIDE_UNSIGNED)

_FEW_TARGETS = 64
"""Up to so many targets, a list of Python's is counted more quickly than a tensor."""
_MISSING = object()

# Ends of the names of classes in transformers, by whether the model shifts its labels.
_SHIFTING = ("ForCausalLM", "LMHeadModel")
_SHIFTING_DECODERS = ("ForConditionalGeneration",)
_NOT_SHIFTING = ("ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
_UNSHIFTED = frozenset(
    {
        "BartForCausalLM",
        "BigBirdPegasusForCausalLM",
        "BlenderbotForCausalLM",
        "BlenderbotSmallForCausalLM",
        "CpmAntForCausalLM",
        "FlaubertWithLMHeadModel",
        "MBartForCausalLM",
        "MarianForCausalLM",
        "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM",
        "MvpForCausalLM",
        "PLBartForCausalLM",
        "PegasusForCausalLM",
        "TrOCRForCausalLM",
        "WhisperForCausalLM",
        "XLMWithLMHeadModel",
        "XLNetLMHeadModel",
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
    # Most criteria that are functions are plain ones: one look at their defaults tells all.
    if type(criterion) is FunctionType and not vars(criterion):
        kind, defaults = criterion, _defaults(criterion)
        ignore_index, class_weight = defaults.get("ignore_index"), defaults.get("weight")
    else:
        kind = type(criterion) if isinstance(criterion, nn.Module) else _function(criterion)
        ignore_index, class_weight = (
            criterion_setting(criterion, "ignore_index"),
            criterion_setting(criterion, "weight"),
        )
    if kind is F.ctc_loss or isinstance(criterion, nn.CTCLoss):
        # It divides the loss of each sample by the length of its target.
        return float(count_samples(data))
    # The matrix of a metric-learning loss, and learned weights of several losses, are called `weight` too.
    if (
        isinstance(class_weight, Tensor)
        and class_weight.ndim == 1
        and not class_weight.requires_grad
    ):
        other = isinstance(criterion, nn.modules.loss._Loss) and not isinstance(
            criterion, (nn.CrossEntropyLoss, nn.NLLLoss)
        )
        # Other losses of torch use the weight, but divide by the number of targets.
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
    weight = criterion_setting(criterion, "weight")
    smoothing = criterion_setting(criterion, "label_smoothing")
    is_mean = criterion_setting(criterion, "reduction") == "mean"
    return (
        is_mean and bool(smoothing) and isinstance(weight, Tensor) and bool((weight == 0.0).any())
    )


def model_weight(
    model: object, target: object, data: object, *, shifts: bool | None = None
) -> float | Tensor:
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


def _is_ctc(criterion: object) -> bool:
    """Whether a criterion divides the loss of each sample by the length of its target, and is a mean over samples."""
    if isinstance(criterion, partial):
        criterion = criterion.func
    return criterion is F.ctc_loss or isinstance(criterion, nn.CTCLoss)


def _dense_weight(criterion: object, target: Tensor) -> float:
    if (
        isinstance(criterion, nn.CrossEntropyLoss) or _function(criterion) is F.cross_entropy
    ) and target.ndim > 1:
        return float(target.numel() // target.shape[1])  # class probabilities: one term a position
    # The mean of the others is over all elements, that of this one over samples, whatever their size.
    if isinstance(criterion, nn.KLDivLoss) and criterion.reduction == "batchmean" and target.ndim:
        return float(target.shape[0])
    return float(target.numel())


def _class_weight(target: Tensor, class_weight: Tensor, ignore_index: int | None) -> Tensor:
    weights = class_weight.to(target.device)
    target = target.long()  # an index of uint8 would be a mask
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
        # Functions that are written in C may have no signature.
        return {}
    return {
        name: p.default
        for name, p in parameters.items()
        if p.default is not inspect.Parameter.empty
    }


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
        # `__class__`, since a wrapper may give that of the model which it wraps.
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
        # The nearest parent decides, and an exception comes before the rule.
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
        self._warns = self._warns_of_samples = runner.is_main_process and not self._own_weight

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

    def weigh(
        self, batch: Batch, data: Any, *, training: bool = False
    ) -> tuple[float | Tensor, float]:
        """Return the weight and the number of samples of a batch; both are 0 for padding and for data that only other ranks read.

        Args:
            batch: The batch as its source gave it.
            data: Its data, on the device.
            training: Whether the batch is trained on.
        """
        if batch.samples == 0 or data is PLACEHOLDER:
            return 0.0, 0.0
        read = batch.read if batch.samples is None else batch.samples
        samples = find_samples(data, read)[0] if batch.samples is None else batch.samples
        # Most batches are pairs, for which one call less is made.
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
        if self._counts_samples(data, target):
            return float(self.count(data, read)), samples
        return self._runner.batch_weight(data, target), samples

    def count(self, data: object, read: float | None) -> float:
        """Return how many samples are in a batch of which the loader has read `read`; name once a batch that does not tell."""
        if read == 0:
            return 0.0
        counted, is_certain = find_samples(data, read)
        if not is_certain and self._warns_of_samples:
            self._warns_of_samples = False
            logger.warning(
                "Expected a batch that tells how many samples it has. Received: parts of the lengths %s%s: %s. It counts as %d. If it has "
                "another number, a mean over samples has another gradient, with several micro-batches or ranks, and another value in "
                "evaluations. Override `batch_weight(data, target)` to return what your loss averages over, and return (sum, weight) from "
                "metrics.",
                lengths_of(data, read),
                "" if read is None else f", with {read:g} samples read",
                shapes_of(data),
                counted,
            )
        return counted

    def _counts_samples(self, data: object, target: object) -> bool:
        """Whether a batch weighs its samples."""
        criterion = self._runner.criterion
        if self._own_weight:
            return False
        if isinstance(target, Tensor) and (target.is_floating_point() or not _is_ctc(criterion)):
            return False
        return criterion is not None or aligned_labels(data) is None

    def weight_of_model(self, data: object, target: object) -> float | Tensor:
        """Return what the loss that the model computes is averaged over."""
        runner = self._runner
        shifts = (
            shifts_labels(runner.unwrapped_model)
            if runner.shifts_labels is None
            else runner.shifts_labels
        )
        of_positions = isinstance(target, Tensor) and target.ndim == 2 and target.dtype in _LABELS
        if shifts is None and not self.own_loss and of_positions and aligned_labels(data) is None:
            ranks = max(runner.placement.data_replicas, runner.placement.metrics.size)
            # Only where the weight of a micro-batch changes the gradient.
            if runner.mode == "train" and (
                ranks > 1 or runner.accum_steps > 1 or runner.window.count
            ):
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
        known = runner.datasets.keys() & runner.sources.keys()
        split = next((name for name in runner.train_splits if name in known), None)
        if split is None or not self._learns:
            return
        options = self._data.settings(split)
        # Files that workers are to open stay closed here, and a dataset may have other keys than positions.
        if (
            runner.sources[split].kind != "position"
            or options.get("num_workers")
            or options.get("collate_fn")
        ):
            return
        with preserved_streams(runner.device), suppress(Exception):
            sample = runner.datasets[split][0]
            # A sample of another library's class is made into a batch by that library, and only the batch has a target.
            is_plain = isinstance(sample, (Tensor, Mapping, list, tuple))
            self.targetless = peek_target(sample if is_plain else collate([sample])) is None
