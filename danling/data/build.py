"""Building the loader of a split from a dataset and the settings under `dataloader`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe
from torch.utils.data import DataLoader as TorchDataLoader

from danling.utils.messages import did_you_mean

from .keyed import KEYED
from .loader import DataLoader, check_settings
from .order import OrderedDataset
from .packing import TokenBudget
from .sampled import SampledLoader, yields_batches
from .shares import OWN, divide_updates
from .stream_loader import StreamLoader
from .workers import WorkerInit

logger = logging.getLogger("danling")

_UNUSED = "snapshot_every_n_steps"
"""A setting of `StatefulDataLoader`: the loaders of the library have the position of each batch."""
SETTINGS = (frozenset(inspect.signature(TorchDataLoader.__init__).parameters) - {"self", "dataset"}) | OWN | {_UNUSED}
"""Valid names under `dataloader`: the arguments of torch's `DataLoader`, and what an update is made of."""


def build_dataloader(
    dataset: object,
    settings: Mapping[str, object],
    *,
    split: str,
    train: bool,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | None = None,
    accum_steps: int = 1,
    canonical: bool = False,
) -> Any:
    """Return the loader of one split.

    A map-style dataset gets a `danling.data.DataLoader`, which divides it over the ranks, and with a `sampler` or
    `batch_sampler` a `SampledLoader`; both come back exactly. An `IterableDataset` gets a `StreamLoader`. Dividing
    it, or the order of a sampler, over ranks is theirs. A loader is returned as it is.

    Args:
        dataset: A dataset, or a loader.
        settings: Arguments of `torch.utils.data.DataLoader`. `shuffle` and `drop_last` default to `train`, `pin_memory` to
            whether the device is CUDA. `batch_size` is that of one rank. `global_batch_size` makes updates of so many
            samples over all ranks, of which a rank holds `micro_batch_size` at once.
        split: Name of the split, for messages.
        train: Whether the split is trained on: then each rank gets the same number of batches.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process in the data domain.
        world_size: Size of the data domain.
        device: Where the batches will go.
        accum_steps: Micro-batches of an update of `global_batch_size` samples.
        canonical: Whether micro-batches, and the batches of an evaluation, are the same at any number of ranks.

    Raises:
        ValueError: If a setting is unknown or invalid, or the dataset is empty or too small.
    """
    if is_loader(dataset):
        return dataset
    _check_names(settings, split)
    if canonical and isinstance(dataset, TokenBudget):
        raise ValueError(
            f"Expected micro-batches of a number of samples for split {split!r} with gradient_sum='canonical'. Received: a TokenBudget, "
            "whose batches have any number. Pack the documents with dl.data.Packed, or set gradient_sum='fast'."
        )
    keyed = _chosen_key(settings, split)
    given, division = divide_updates(
        settings, split=split, train=train, world_size=world_size, accum_steps=accum_steps, canonical=canonical
    )
    options = {"pin_memory": device is not None and device.type == "cuda", **given, "keyed": keyed}
    options.pop(_UNUSED, None)
    if division is not None and division.is_update:
        _check_divisible(dataset, options, split)
    placement: dict[str, Any] = {"split": split, "seed": seed, "rank": rank, "world_size": world_size}
    try:
        if isinstance(dataset, IterableDataset):
            return _build_iterable(dataset, options, placement, train=train)
        if options.get("sampler") is not None or options.get("batch_sampler") is not None:
            return _build_sampled(dataset, options, placement, train=train)
        if isinstance(dataset, TokenBudget):
            options = _take_batches(dataset, options, split, divided=division is not None)
        options = {
            "shuffle": train and not isinstance(dataset, OrderedDataset),
            "drop_last": train and options.get("batch_size", 1) is not None,
            **_without_none(options),
        }
        return DataLoader(dataset, pad=train, **options, **placement, division=division)
    except ValueError as error:
        if str(error).startswith("Expected"):
            raise
        raise ValueError(
            f"Expected dataloader settings of split {split!r} that go together. Received: {dict(settings)}. {error}"
        ) from error


def order_setting(sampler: object, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the setting under which a sampler goes: `batch_sampler`, if it yields the batches themselves, else `sampler`.

    Args:
        sampler: A sampler or a batch sampler. A class of the user's own that yields lists is known as one where no `batch_size` is set.
        settings: The other settings of the split.
    """
    asks = "batch_size" not in settings or isinstance(sampler, BatchSampler)
    if not asks and settings["batch_size"] is None and yields_batches(sampler):
        logger.info(
            "dataloader.batch_size=None: the dataset is asked for each list of indices of the %s at once. Leave batch_size out to have "
            "single samples read and made into a batch.",
            type(sampler).__name__,
        )
    return {"batch_sampler" if asks and yields_batches(sampler) else "sampler": sampler}


def is_loader(dataset: object) -> bool:
    """Return whether something is to be iterated as it is: a torch loader, or an iterable without items by index."""
    if isinstance(dataset, TorchDataLoader):
        return True
    return (
        not isinstance(dataset, IterableDataset)
        and not hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__iter__")
    )


def _check_names(settings: Mapping[str, object], split: str) -> None:
    for name in settings:
        if name not in SETTINGS:
            raise ValueError(
                f"Expected dataloader settings out of {sorted(SETTINGS)}. Received: {name!r} for split {split!r}."
                f"{did_you_mean(name, [*SETTINGS, split])}"
            )


def _chosen_key(settings: Mapping[str, object], split: str) -> object:
    """Return what reading is seeded by: where updates have one size at any number of processes, so have the samples."""
    keyed = settings.get("keyed")
    if keyed is None:
        return "batch" if settings.get("global_batch_size") is None else "sample"
    if keyed not in KEYED:
        raise ValueError(
            f"Expected dataloader.keyed of split {split!r} to be one of {list(KEYED)}. Received: keyed={keyed!r} ({type(keyed).__name__})."
        )
    return keyed


def _check_divisible(dataset: object, options: Mapping[str, object], split: str) -> None:
    """Refuse to divide updates of data whose order is not the library's."""
    received = type(dataset).__name__ if isinstance(dataset, IterableDataset) else None
    received = next((f"a {name}" for name in ("batch_sampler", "sampler") if options.get(name) is not None), received)
    if received is not None:
        raise ValueError(
            f"Expected a map-style dataset and the library's own order for split {split!r}: dataloader.global_batch_size "
            f"divides every update over the ranks. Received: {received}, which divides itself. Set "
            "dataloader.batch_size, the samples of a batch on each rank, instead."
        )


def _take_batches(dataset: TokenBudget, options: dict[str, Any], split: str, *, divided: bool) -> dict[str, Any]:
    size = options.get("batch_size")
    if divided or size is not None:
        received = "dataloader.global_batch_size" if divided else f"dataloader.batch_size={size!r}"
        raise ValueError(
            f"Expected no batch size for split {split!r}: a TokenBudget makes batches of at most {dataset.limit} tokens. Received: "
            f"{received}. Set dataloader.{split}.batch_size to None; accum_steps says how many batches of each rank make an update."
        )
    collate_fn = options.get("collate_fn") or dataset.collate
    return {**options, "batch_size": None, "drop_last": False, "collate_fn": collate_fn}


def _build_iterable(dataset: Any, options: dict[str, Any], placement: Mapping[str, Any], *, train: bool) -> object:
    if placement["world_size"] > 1:
        logger.info(
            "Split %r is an IterableDataset: each of the %d ranks reads what it yields there; it has to divide itself.",
            placement["split"],
            placement["world_size"],
        )
    # Its own order is all it has, so the default of shuffling on training splits is not applied.
    options = {"drop_last": train and options.get("batch_size", 1) is not None, **options}
    place = {name: placement[name] for name in ("split", "seed", "rank")}
    if isinstance(dataset, IterDataPipe):  # torch shuffles and divides it by its type
        del options["keyed"]
        return TorchDataLoader(dataset, **{**options, "worker_init_fn": WorkerInit(options.get("worker_init_fn"))})
    return StreamLoader(dataset, **options, **place)


def _build_sampled(dataset: Any, options: dict[str, Any], placement: Mapping[str, Any], *, train: bool) -> object:
    if options.get("batch_sampler") is None:
        options = {"drop_last": train and options.get("batch_size", 1) is not None, **_without_none(options)}
    _check_sampled(options, placement["split"])
    return SampledLoader(dataset, **{**options, "shuffle": None}, **placement)


def _check_sampled(options: Mapping[str, Any], split: str) -> None:
    alone = "batch_sampler" if options.get("batch_sampler") is not None else "sampler"
    decided = ("batch_size", "sampler", "shuffle", "drop_last") if alone == "batch_sampler" else ("shuffle",)
    others = {name: options[name] for name in decided if options.get(name)}
    if others:
        raise ValueError(f"{alone} decides {', '.join(others)}: leave {'it' if len(others) == 1 else 'them'} out.")
    check_settings(options, options.get("num_workers", 0), split)


def _without_none(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options without the samplers, which are `None` here, and without choices that are left open."""
    open_choices = {"sampler", "batch_sampler", "generator", "shuffle", "drop_last"}
    return {name: value for name, value in options.items() if value is not None or name not in open_choices}
