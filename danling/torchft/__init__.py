"""Replica groups that may die and come back, by TorchFT: which groups take part in an update, the sums over them, and their data."""

from __future__ import annotations

from .groups import QuorumError
from .member import ReplicaMember

__all__ = ["QuorumError", "ReplicaMember"]
