"""Samples that another process makes while training runs."""

from __future__ import annotations

from .channels import FileChannel, MemoryChannel, SQLiteChannel
from .protocols import FeatureStore, RefChannel, StreamEnd
from .refs import SampleRef, TensorSpec
from .stores import DirectoryStore, MemoryStore

__all__ = [
    "DirectoryStore",
    "FeatureStore",
    "FileChannel",
    "MemoryChannel",
    "MemoryStore",
    "RefChannel",
    "SQLiteChannel",
    "SampleRef",
    "StreamEnd",
    "TensorSpec",
]
