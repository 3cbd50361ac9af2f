"""A model over a device mesh: the seven axes, the place of a rank on them, and how the model is divided over it."""

from __future__ import annotations

from .axes import (
    AXES,
    Axes,
    check_divisible,
    check_expert_width,
    check_experts,
    check_heads,
    check_micro_batches,
    check_sequence,
)
from .topology import ParallelContext, Topology

__all__ = [
    "AXES",
    "Axes",
    "ParallelContext",
    "Topology",
    "check_divisible",
    "check_expert_width",
    "check_experts",
    "check_heads",
    "check_micro_batches",
    "check_sequence",
]
