"""Activation checkpointing: blocks whose activations are computed again in the backward instead of kept."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from .model_parts import copied_buffers


def recompute_blocks(part: nn.Module, blocks: Iterable[nn.Module], *, compiled: bool) -> None:
    """Wrap blocks of a model, in place, so that their activations are computed again."""
    chosen = {id(block) for block in blocks}
    apply_activation_checkpointing(
        part, checkpoint_wrapper_fn=partial(_wrapped, compiled=compiled), check_fn=lambda module: id(module) in chosen
    )


def _wrapped(block: nn.Module, *, compiled: bool) -> nn.Module:
    # What a forward leaves in buffers, it has left there the first time.
    if compiled or not any(True for _ in block.buffers()):
        return checkpoint_wrapper(block)
    return checkpoint_wrapper(block, context_fn=lambda: (nullcontext(), copied_buffers(block)))


def recomputes(parts: Iterable[nn.Module]) -> bool:
    """Return whether a block of these parts is computed again."""
    return any(isinstance(module, CheckpointWrapper) for part in parts for module in part.modules())
