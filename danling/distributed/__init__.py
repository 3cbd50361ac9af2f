"""The ranks of a run: environment, process groups, domains and the votes of an update."""

from __future__ import annotations

from .calls import FAMILIES, CollectiveCallError, CollectiveCalls
from .domain import (
    Domain,
    LocalDomain,
    MembershipChanged,
    Placement,
    all_arrive,
    default_store,
    world_of,
)
from .environment import (
    LaunchEnvironment,
    check_tasks,
    collective_timeout,
    destroy_process_group,
    init_process_group,
    select_device,
    set_collective_timeout,
)
from .step_sync import (
    REQUESTS,
    UNUSED_PARAMETER,
    ExtraReduction,
    GradientNorms,
    HostCopy,
    ReplicaDriftError,
    StepSync,
    StepTotals,
    agree,
)

__all__ = [
    "FAMILIES",
    "REQUESTS",
    "UNUSED_PARAMETER",
    "CollectiveCallError",
    "CollectiveCalls",
    "Domain",
    "ExtraReduction",
    "GradientNorms",
    "HostCopy",
    "LaunchEnvironment",
    "LocalDomain",
    "MembershipChanged",
    "Placement",
    "ReplicaDriftError",
    "StepSync",
    "StepTotals",
    "agree",
    "all_arrive",
    "check_tasks",
    "collective_timeout",
    "default_store",
    "destroy_process_group",
    "init_process_group",
    "select_device",
    "set_collective_timeout",
    "world_of",
]
