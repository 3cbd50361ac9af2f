"""Where a run stands: environment, process groups, domains and the votes of an update."""

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
from .ballot import REQUESTS, Ballot, Verdict, agree
from .domain import Domain, LocalDomain
from .environment import (
    LaunchEnvironment,
    destroy_process_group,
    init_process_group,
    select_device,
    set_collective_timeout,
)
from .fault_tolerance import QuorumError, ReplicaGroups, ReplicaSettings
from .lighthouse import WaitAbandonedError
from .meeting import all_arrive
from .topology import ParallelContext, Topology

__all__ = [
    "AXES",
    "REQUESTS",
    "Axes",
    "Ballot",
    "Domain",
    "LaunchEnvironment",
    "LocalDomain",
    "ParallelContext",
    "QuorumError",
    "ReplicaGroups",
    "ReplicaSettings",
    "Topology",
    "Verdict",
    "WaitAbandonedError",
    "agree",
    "all_arrive",
    "check_divisible",
    "check_expert_width",
    "check_experts",
    "check_heads",
    "check_micro_batches",
    "check_sequence",
    "destroy_process_group",
    "init_process_group",
    "select_device",
    "set_collective_timeout",
]
