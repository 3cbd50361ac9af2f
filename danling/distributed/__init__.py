"""Where a run stands: environment, process groups, domains and the votes of an update."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from .board import Board
from .domain import Domain, LocalDomain, world_of
from .environment import (
    LaunchEnvironment,
    collective_timeout,
    destroy_process_group,
    init_process_group,
    select_device,
    set_collective_timeout,
)
from .meeting import JointLeave, all_arrive, default_store
from .placement import Placement
from .step_sync import REQUESTS, GradientNorms, ReplicaDriftError, StepSync, StepTotals, agree

__all__ = [
    "REQUESTS",
    "Board",
    "Domain",
    "GradientNorms",
    "JointLeave",
    "LaunchEnvironment",
    "LocalDomain",
    "Placement",
    "ReplicaDriftError",
    "StepSync",
    "StepTotals",
    "agree",
    "all_arrive",
    "collective_timeout",
    "default_store",
    "destroy_process_group",
    "init_process_group",
    "select_device",
    "set_collective_timeout",
    "world_of",
]

_MOVED_TO_MESH = frozenset(
    {
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
    }
)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MOVED_TO_MESH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        message = (
            f"danling.distributed.{name} has moved to danling.mesh.{name}; the old name goes with the next version."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module("danling.mesh"), name)
