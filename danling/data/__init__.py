"""Loaders, samplers, randomness keyed by sample, and moving batches to the device."""

from __future__ import annotations

from .build import build_dataloader, order_setting
from .collation import move_to_device
from .datamodule import LoaderSettings, from_datamodule
from .keyed import KeyedDataset
from .loader import DataLoader
from .mixture import Mixture
from .packing import Packed, TokenBudget, cu_seqlens
from .randomness import derive_seed, mix_seed, seed_streams
from .sampler import PositionedBatchSampler
from .shares import AUTO, Division, divide_updates, merge_settings
from .source import PLACEHOLDER, BatchSource, open_source
from .splits import Splits
from .windows import Batch, ReaderPlace, WindowLoader

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
    "Packed",
    "PositionedBatchSampler",
    "ReaderPlace",
    "Splits",
    "TokenBudget",
    "WindowLoader",
    "build_dataloader",
    "cu_seqlens",
    "derive_seed",
    "divide_updates",
    "from_datamodule",
    "merge_settings",
    "mix_seed",
    "move_to_device",
    "open_source",
    "order_setting",
    "seed_streams",
]
