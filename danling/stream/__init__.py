"""Samples that another process makes while training runs."""

from __future__ import annotations

from .channel import RefChannel, StreamEnd
from .directory_store import DirectoryStore
from .file_channel import FileChannel
from .loader import FeatureDataset, Sample, StreamLoader
from .mooncake_store import MooncakeStore
from .producer import EqualLengthBatches, FeatureProducer, run_together
from .refs import SampleRef, TensorSpec
from .sqlite_channel import MemoryChannel, SQLiteChannel
from .store import FeatureStore, MemoryStore

__all__ = [
    "DirectoryStore",
    "EqualLengthBatches",
    "FeatureDataset",
    "FeatureProducer",
    "FeatureStore",
    "FileChannel",
    "MemoryChannel",
    "MemoryStore",
    "MooncakeStore",
    "RefChannel",
    "SQLiteChannel",
    "Sample",
    "SampleRef",
    "StreamEnd",
    "StreamLoader",
    "TensorSpec",
    "run_together",
]
