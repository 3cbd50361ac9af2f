"""torchvision where there is no build of it for the CPU: what it needs of its compiled operators is their names."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

_OPERATORS = (
    *(
        "nms",
        "qnms",
        "roi_align",
        "_roi_align_backward",
        "roi_pool",
        "_roi_pool_backward",
        "ps_roi_align",
    ),
    *(
        "_ps_roi_align_backward",
        "ps_roi_pool",
        "_ps_roi_pool_backward",
        "deform_conv2d",
        "_deform_conv2d_backward",
    ),
)
_library: torch.library.Library | None = None


def import_or_skip(name: str) -> Any:
    """Return torchvision, or a module that imports it; skip the test where it is not installed.

    The build for CUDA cannot load its operators beside a torch for the CPU, and its import fails for want of them. Transforms do
    without, so names are enough.
    """
    global _library
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(str(error), allow_module_level=True)
    except (RuntimeError, ImportError):
        if _library is None:
            _library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for operator in _OPERATORS:
                _library.define(f"{operator}(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
        return importlib.import_module(name)
