"""Samples that another process makes while training runs."""

from __future__ import annotations

from .protocols import FeatureStore, RefChannel, StreamEnd
from .refs import SampleRef, TensorSpec

__all__ = ["FeatureStore", "RefChannel", "SampleRef", "StreamEnd", "TensorSpec"]
