"""Replica groups that may die and come back, by TorchFT: who takes part in an update, what is summed, which data each group reads."""

from __future__ import annotations

from .groups import QuorumError, ReplicaGroups
from .member import ReplicaMember

__all__ = ["QuorumError", "ReplicaGroups", "ReplicaMember"]
