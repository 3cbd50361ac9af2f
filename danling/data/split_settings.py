"""Which settings under `dataloader` hold for a split: those that all splits share, and its own over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .build import SIZES
from .workers import OF_WORKERS

ORDER = ("shuffle", "drop_last", "sampler", "batch_sampler")
"""Settings of order and dropping. Those that all splits share, and those of a split to train on, hold for training: an evaluation reads
every sample once, in the order of the dataset."""


def divide_section(
    section: Mapping[str, Any], split: str, splits: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the section `dataloader` that all splits share, and those in the section of one split."""
    shared = {name: value for name, value in section.items() if name not in splits}
    own = section.get(split)
    return shared, dict(own.items()) if isinstance(own, Mapping) else {}


def without_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of training that an evaluation has too."""
    return {name: value for name, value in settings.items() if name not in (*ORDER, "own_state")}


def merge_settings(common: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of one split over those that all splits share.

    A batch size in the split's own section replaces the other kind of batch size in the common section. Settings of workers in
    the common section do not apply to a split without workers.
    """
    replaced: set[str] = set(OF_WORKERS) if own.get("num_workers") == 0 else set()
    if own.get("batch_size") is not None:
        replaced |= SIZES
    if own.get("global_batch_size") is not None:
        replaced.add("batch_size")
    return {**{name: value for name, value in common.items() if name not in replaced}, **own}
