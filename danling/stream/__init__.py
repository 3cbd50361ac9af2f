"""Samples that another process makes while training runs."""

from __future__ import annotations

from .channels import FileChannel, MemoryChannel, SQLiteChannel
from .lengths import EqualLengthBatches
from .loader import FeatureDataset, Sample, StreamLoader
from .producer import FeatureProducer
from .protocols import FeatureStore, RefChannel, SampleRef, StreamEnd, TensorSpec
from .stores import DirectoryStore, MemoryStore, MooncakeStore
from .together import run_together

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
