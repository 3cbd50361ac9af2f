"""Samples that another process makes while training runs."""

from __future__ import annotations

from .channels import MemoryChannel
from .protocols import FeatureStore, RefChannel, StreamEnd
from .refs import SampleRef, TensorSpec
from .stores import DirectoryStore, MemoryStore

__all__ = [
    "DirectoryStore",
    "FeatureStore",
    "MemoryChannel",
    "MemoryStore",
    "RefChannel",
    "SampleRef",
    "StreamEnd",
    "TensorSpec",
]
