"""Loaders, samplers, randomness keyed by sample, and moving batches to the device."""

from __future__ import annotations

from .build import build_dataloader
from .collation import move_to_device
from .datamodule import LoaderSettings, from_datamodule
from .loader import PLACEHOLDER, DataLoader
from .mixture import Mixture
from .packing import Packed, TokenBudget, cu_seqlens
from .randomness import derive_seed, mix_seed, seed_streams
from .sampler import Batch, Division, PositionedBatchSampler, Share
from .source import BatchSource, LoaderContext, UpdateLoader, open_source

__all__ = [
    "PLACEHOLDER",
    "Batch",
    "BatchSource",
    "DataLoader",
    "Division",
    "LoaderContext",
    "LoaderSettings",
    "Mixture",
    "Packed",
    "PositionedBatchSampler",
    "Share",
    "TokenBudget",
    "UpdateLoader",
    "build_dataloader",
    "cu_seqlens",
    "derive_seed",
    "from_datamodule",
    "mix_seed",
    "move_to_device",
    "open_source",
    "seed_streams",
]
