"""Replica groups that die and come back, by TorchFT: who takes part in an update, what is summed, and each group's place in the data."""

from __future__ import annotations

from .groups import QuorumError, ReplicaGroups
from .healing import Healing
from .lighthouse import WaitAbandonedError
from .loader_checkpoints import OwnPositions, ReplicaLoaderCheckpoints
from .member import ReplicaMember
from .settings import ReplicaSettings, check_layout, position_owner
from .update import ReplicatedReduction, ReplicatedUpdate

__all__ = [
    "Healing",
    "OwnPositions",
    "QuorumError",
    "ReplicaGroups",
    "ReplicaLoaderCheckpoints",
    "ReplicaMember",
    "ReplicaSettings",
    "ReplicatedReduction",
    "ReplicatedUpdate",
    "WaitAbandonedError",
    "check_layout",
    "position_owner",
]
