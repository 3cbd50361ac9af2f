"""What can be learnt about, and told to, a loader that the user made."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from itertools import islice
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger("danling")

_VALUES = 64
"""How many values of a tensor or a list are looked at."""
_SPREAD = 8
"""How many values of a row make its part of a fingerprint, about."""


def call_set_epoch(loader: object, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its dataset, wherever it exists."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    distinct = {id(holder): holder for holder in (*holders, getattr(loader, "dataset", None))}
    for holder in distinct.values():
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def order_is_of_rank(loader: object) -> bool:
    """Return whether each rank may seed the order by itself.

    Another sampler may draw one permutation for all ranks and take a part of it, for which all must draw the same.
    """
    return type(getattr(loader, "sampler", None)) in (RandomSampler, SequentialSampler, DistributedSampler)


def describe_dataset(loader: object) -> object:
    """Return what a dataset holds, as far as it can be told without reading it, where the loader reads all of it; else `None`.

    Reading a sample would open files in this process that only workers are to open.
    """
    if not isinstance(loader, TorchDataLoader) or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return None
    return describe(loader.dataset, depth=4)


def describe(value: Any, depth: int = 4) -> object:
    """Return the plain values in something, and the first ones of its tensors and arrays, to compare it with another.

    Args:
        value: A batch, or what a dataset holds.
        depth: How deep to look.
    """
    if isinstance(value, Tensor) or (hasattr(value, "dtype") and hasattr(value, "ravel")):
        return str(value.dtype), tuple(value.shape), value.ravel()[:_VALUES].tolist()
    if isinstance(value, (str, bytes, bool, int, float, range, type(None), os.PathLike)):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return [(repr(name), describe(item, depth - 1)) for name, item in islice(value.items(), _VALUES)]
    if isinstance(value, (list, tuple)):
        return len(value), [describe(item, depth - 1) for item in value[:_VALUES]]
    return type(value).__name__, describe(getattr(value, "__dict__", {}), depth - 1)


def fingerprint(data: object, before: int | None = None) -> int | None:
    """Return a checksum of some values of a batch or a sample, and of those that were read before it.

    It is made for every batch that is read, so that it looks at few values of a tensor and 64 objects in all, and copies nothing.

    Args:
        data: What was read.
        before: Checksum of what was read before; `None` if there is none.

    Returns:
        The checksum; `None` where it would wait for a device, and of objects that do not let themselves be looked at.
    """
    found: list[object] = []
    try:
        _look_at(data, found)
        return crc32(repr(found).encode(), before or 0)
    except Exception:
        return None


def _look_at(data: Any, found: list[object]) -> None:
    if len(found) >= _VALUES:
        return
    if isinstance(data, Tensor):
        if data.device.type != "cpu":
            raise ValueError("its values are on a device")
        found += (data.dtype, *data.shape, _spread(data))
    elif isinstance(data, (str, bytes)):
        found += (len(data), data[:_VALUES])
    elif isinstance(data, Mapping):
        for name, item in islice(data.items(), _VALUES):
            found.append(name if isinstance(name, str) else repr(name))
            _look_at(item, found)
    elif isinstance(data, (list, tuple)):
        found.append(len(data))
        for item in data[:_VALUES]:
            _look_at(item, found)
    elif isinstance(data, (bool, int, float, range, type(None), os.PathLike)):
        found.append(data)
    elif hasattr(data, "dtype") and hasattr(data, "ravel"):
        found += (data.dtype, *data.shape, _spread(data))
    else:
        found.append(type(data).__name__)
        _look_at(getattr(data, "__dict__", ()), found)


def _spread(values: Any) -> object:
    """Return a few values from the middle of a tensor or an array: the first row may be padding, and the last one too."""
    while values.ndim > 1 and len(values):
        values = values[len(values) // 2]
    return values[:: max(len(values) // _SPREAD, 1)].tolist() if values.ndim else values.item()


def say_order_differs(split: str, source: object, read: int) -> None:
    """Say that what was read again is not what was read before the run was saved.

    Args:
        split: The split.
        source: Its loader or dataset.
        read: How much was read again.
    """
    logger.warning(
        "Reading split %r (%s) again gave something else at place %d than before the run was saved: from here on some samples of "
        "this pass are left out and others come twice. Its order or its samples depend on the clock, the process or a generator that "
        "is made while it is read. Hand it a generator that it holds, such as `rng=random.Random(0)`, which is seeded for each batch.",
        split,
        type(source).__name__,
        read,
    )


def shares_evenly(loader: object) -> bool:
    """Return whether the loader's sampler gives every rank the same number of samples."""
    return isinstance(loader, TorchDataLoader) and isinstance(loader.sampler, DistributedSampler)


def equalize_draws(loader: object) -> None:
    """Draw what torch draws when it starts workers, if it will not start any because it has kept them.

    Without it the order of a pass would depend on whether the workers are new, as they are in a resumed run.
    """
    kept = getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None
    if kept and isinstance(loader, TorchDataLoader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
