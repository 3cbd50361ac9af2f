"""Optimizers and schedules by name, parameter groups, and optimizer state by parameter name."""

from __future__ import annotations

from .arguments_of_step import needs_metric
from .joint import JointOptimizer, JointScheduler
from .registry import OPTIMIZERS, SCHEDULERS, build_param_groups
from .warmup import ConstantSchedule, CosineSchedule, LinearSchedule, WarmupScheduler, WSDSchedule

__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "ConstantSchedule",
    "CosineSchedule",
    "JointOptimizer",
    "JointScheduler",
    "LinearSchedule",
    "WSDSchedule",
    "WarmupScheduler",
    "build_param_groups",
    "needs_metric",
]
