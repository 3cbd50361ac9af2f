"""Inheritance-first training runners for PyTorch.

Subclass `TorchRunner` (or `Runner`, which picks the stack from the configuration), put model, data and optimizer on it in
`__init__`, override what you want, and call `train()`.
"""

from __future__ import annotations

from . import metrics, optim
from .optim import OPTIMIZERS, SCHEDULERS
from .runners import BaseRunner, MetaRunner, Runner, RunnerConfig, RunnerState, TorchRunner

__version__ = "0.1.0"

__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "BaseRunner",
    "MetaRunner",
    "Runner",
    "RunnerConfig",
    "RunnerState",
    "TorchRunner",
    "metrics",
    "optim",
]
