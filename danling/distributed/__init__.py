"""Where a run stands: environment, process groups, domains and the votes of an update."""

from __future__ import annotations

from .ballot import REQUESTS, Ballot, Verdict, agree
from .domain import Domain, LocalDomain
from .environment import LaunchEnvironment, destroy_process_group, init_process_group, select_device

__all__ = [
    "REQUESTS",
    "Ballot",
    "Domain",
    "LaunchEnvironment",
    "LocalDomain",
    "Verdict",
    "agree",
    "destroy_process_group",
    "init_process_group",
    "select_device",
]
