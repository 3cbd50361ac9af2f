"""A model over a device mesh: the parallel axes, the place of a rank on them, and how the model is divided over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

from .axes import AXES, TRAITS, Axes, AxisTraits, axes_with

if TYPE_CHECKING:
    from .topology import Topology
else:
    # The axes are plain integers: the command line reads them without torch.
    __getattr__, __dir__ = lazily(__name__, {"topology": ("Topology",)})

__all__ = ["AXES", "TRAITS", "Axes", "AxisTraits", "Topology", "axes_with"]
