"""A model over a device mesh: the parallel axes, the place of a rank on them, and how the model is divided over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .axes import (
        AXES,
        TRAITS,
        Axes,
        AxisTraits,
        axes_with,
        check_divisible,
        check_expert_width,
        check_experts,
        check_heads,
        check_micro_batches,
        check_sequence,
    )
    from .topology import ParallelContext, Topology
else:
    # The axes are plain integers: the command line reads them without torch.
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "axes": (
                "AXES",
                "TRAITS",
                "Axes",
                "AxisTraits",
                "axes_with",
                "check_divisible",
                "check_expert_width",
                "check_experts",
                "check_heads",
                "check_micro_batches",
                "check_sequence",
            ),
            "topology": ("ParallelContext", "Topology"),
        },
    )

__all__ = [
    "AXES",
    "TRAITS",
    "Axes",
    "AxisTraits",
    "ParallelContext",
    "Topology",
    "axes_with",
    "check_divisible",
    "check_expert_width",
    "check_experts",
    "check_heads",
    "check_micro_batches",
    "check_sequence",
]
