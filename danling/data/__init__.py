"""Loaders, samplers, randomness keyed by sample, and moving batches to the device."""

from __future__ import annotations

from .batching import AUTO, divide_updates, merge_settings
from .build import build_dataloader, order_setting
from .cursors import Batch
from .datamodule import LoaderSettings, from_datamodule
from .glance import can_glance, glanced
from .keyed import KeyedDataset
from .loader import DataLoader
from .mixture import Mixture
from .movement import move_to_device
from .proxy import PLACEHOLDER, ProxySource
from .randomness import (
    capture_random_state,
    derive_seed,
    mix_seed,
    preserved_random_state,
    restore_random_state,
    seed_streams,
)
from .sampler import PositionedBatchSampler
from .shares import Division
from .source import BatchSource
from .splits import Splits, open_source
from .windows import ReaderPlace, WindowLoader

__all__ = [
    "AUTO",
    "PLACEHOLDER",
    "Batch",
    "BatchSource",
    "DataLoader",
    "Division",
    "KeyedDataset",
    "LoaderSettings",
    "Mixture",
    "PositionedBatchSampler",
    "ProxySource",
    "ReaderPlace",
    "Splits",
    "WindowLoader",
    "build_dataloader",
    "can_glance",
    "capture_random_state",
    "derive_seed",
    "divide_updates",
    "from_datamodule",
    "glanced",
    "merge_settings",
    "mix_seed",
    "move_to_device",
    "open_source",
    "order_setting",
    "preserved_random_state",
    "restore_random_state",
    "seed_streams",
]
