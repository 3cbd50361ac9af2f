"""Tensors of classes of their own in the state of an optimizer, such as moments in 8 bits: in a checkpoint they are plain tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from danling.utils.tensors import is_sharded

_CLASS, _PARTS, _CONTEXT, _SHAPE, _STRIDE = "tensor_class", "parts", "context", "shape", "stride"


def to_parts(value: object) -> object:
    """Return a tensor that is made of others as a mapping of these and what puts them together; anything else as it is.

    It is such as `torch.compile` takes apart: with `__tensor_flatten__`. A DTensor is left, since checkpoints know it.
    """
    if not isinstance(value, Tensor) or is_sharded(value) or not is_traceable_wrapper_subclass(value):
        return value
    names, context = value.__tensor_flatten__()
    kind = type(value)
    return {
        _CLASS: f"{kind.__module__}:{kind.__qualname__}",
        _PARTS: {name: to_parts(getattr(value, name)) for name in names},
        _CONTEXT: context,
        _SHAPE: list(value.shape),
        _STRIDE: list(value.stride()),
    }


def from_parts(value: object) -> object:
    """Return a copy of what `to_parts` was given; of a plain tensor too.

    The class is looked up in modules that are loaded: the program that made the optimizer has it, and no file decides what is imported.
    """
    if isinstance(value, Tensor):
        return value.clone()
    if not isinstance(value, Mapping) or _CLASS not in value:
        return value
    parts = {name: from_parts(part) for name, part in value[_PARTS].items()}
    kind = _class(str(value[_CLASS]))
    return kind.__tensor_unflatten__(parts, value[_CONTEXT], torch.Size(value[_SHAPE]), tuple(value[_STRIDE]))


def _class(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    # A dotted path would lead through other objects.
    found = getattr(found, path, None) if path.isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise ValueError(
            f"Expected the optimizer that the checkpoint was saved with, whose state has tensors of the class {name}. Received: a program "
            "that has not loaded it. Make the same optimizer, or add 'optimizer' to checkpoint.exclude_from_loading."
        )
    return found
