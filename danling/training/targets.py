"""Where the target of a batch stands, which models shift it, and when nothing tells what a loss was averaged over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

TARGET_NAMES = ("target", "targets", "label", "labels", "y")
"""Names under which a target is found in a batch that is a mapping, the first one that is there."""

IGNORED_LABEL = -100
"""The label that a model leaves out of a loss of its own: the default of `torch.nn.functional.cross_entropy`."""

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


def target_name(data: Mapping[str, object]) -> str | None:
    """Return the name of the target in a batch, `None` where it has none of `TARGET_NAMES`."""
    return next((name for name in TARGET_NAMES if name in data), None)


def find_target(data: Mapping[str, object]) -> object:
    """Return the target in a batch, or in the mapping under its key `input`; `None` where neither has one of `TARGET_NAMES`."""
    name, inner = target_name(data), data.get("input")
    if name is None and isinstance(inner, Mapping):
        data, name = inner, target_name(inner)
    return data[name] if name is not None else None


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
    for module in _inwards(model):
        told = getattr(module, "shifts_labels", None)
        if isinstance(told, bool):
            return told
        kind = _kind(module.__class__)
        if kind == "decoder":
            return not getattr(getattr(module, "config", None), "is_encoder_decoder", False)
        if kind is not None:
            return kind == "shifting"
    return None


def _inwards(model: object) -> Iterator[Any]:
    """Yield a module, then the only module in it, and so on."""
    while True:
        yield model
        inner = list(model.children()) if isinstance(model, nn.Module) else []
        if len(inner) != 1:
            return
        model = inner[0]


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


def counted_labels(target: Tensor, *, shifts: bool) -> Tensor:
    """Return the labels that the loss of a model can count: all of them, or all but the first of each sequence."""
    return target[:, 1:] if target.ndim > 1 and shifts else target


def unweighed(data: object) -> str:
    """Return the sentence for a criterion that leaves some targets out and a batch in which no target was found."""
    received = f"a mapping with the keys {sorted(map(str, data))}" if isinstance(data, Mapping) else type(data).__name__
    if isinstance(data, (tuple, list)):
        received = f"a sequence of length {len(data)}"
    return (
        f"Expected a target in each batch, by which its loss is weighed. Received: {received}. Its samples are counted instead, which is "
        f"another gradient where the loss is averaged over something else, such as targets or sample weights. Call the target one of "
        f"{', '.join(TARGET_NAMES)}, or override `batch_weight(data, target)`."
    )
