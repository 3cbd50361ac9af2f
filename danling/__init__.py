"""Inheritance-first training runners for PyTorch.

Subclass `TorchRunner` (or `Runner`, which picks the stack from the configuration), put model, data and optimizer on it in
`__init__`, override what you want, and call `train()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from . import metrics, optim
    from .cli.plot import draw_curves
    from .optim import OPTIMIZERS, SCHEDULERS
    from .runners import (
        AccelerateRunner,
        BaseRunner,
        DeepSpeedRunner,
        GraphRunner,
        MetaRunner,
        ParallelRunner,
        Runner,
        RunnerConfig,
        RunnerState,
        TorchRunner,
    )
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "danling.cli.plot": ("draw_curves",),
            "optim": ("OPTIMIZERS", "SCHEDULERS"),
            "runners": (
                "AccelerateRunner",
                "BaseRunner",
                "DeepSpeedRunner",
                "GraphRunner",
                "MetaRunner",
                "ParallelRunner",
                "Runner",
                "RunnerConfig",
                "RunnerState",
                "TorchRunner",
            ),
        },
    )

__version__ = "0.2.0"

__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "AccelerateRunner",
    "BaseRunner",
    "DeepSpeedRunner",
    "GraphRunner",
    "MetaRunner",
    "ParallelRunner",
    "Runner",
    "RunnerConfig",
    "RunnerState",
    "TorchRunner",
    "draw_curves",
    "metrics",
    "optim",
]
