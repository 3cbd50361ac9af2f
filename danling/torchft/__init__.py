"""Replica groups that die and come back, by TorchFT: who takes part in an update, what is summed, and each group's place in the data."""

from __future__ import annotations

from .groups import QuorumError, ReplicaGroups, ReplicaSettings
from .lighthouse import WaitAbandonedError
from .loader_checkpoints import ReplicaLoaderCheckpoints
from .update import ReplicatedReduction, ReplicatedUpdate

__all__ = [
    "QuorumError",
    "ReplicaGroups",
    "ReplicaLoaderCheckpoints",
    "ReplicaSettings",
    "ReplicatedReduction",
    "ReplicatedUpdate",
    "WaitAbandonedError",
]
