"""Building the loader of a split from a dataset and the settings under `dataloader`, and how these divide updates."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe
from torch.utils.data import DataLoader as TorchDataLoader

from danling.utils.devices import pins_memory
from danling.utils.messages import did_you_mean, name_of_code

from .dataset_state import check_read_by_place
from .loader import DataLoader, StreamLoader
from .order import OrderedDataset
from .packing import TokenBudget
from .sampled import sampled_loader
from .sampler import Division, Share, WholeMicroBatches
from .workers import WorkerInit

AUTO = "auto"
"""The `micro_batch_size` that is found by trying: it is halved when memory runs out."""
SIZES = frozenset({"global_batch_size", "micro_batch_size"})
OWN = SIZES | {"keyed", "own_state", "snapshot_every_n_steps"}
"""Settings of a split that are not arguments of a loader. The last one is that of a `StatefulDataLoader`, which a program makes itself."""
SETTINGS = {*inspect.signature(TorchDataLoader).parameters, *OWN} - {"dataset"}
"""Valid names under `dataloader`: the arguments of torch's `DataLoader`, and what an update is made of."""
_OPEN = frozenset({"sampler", "batch_sampler", "generator", "shuffle", "drop_last"})
"""Settings that are left out where they are `None`: the library then decides."""
_OBJECTS = ("collate_fn", "worker_init_fn", "sampler", "batch_sampler")
"""Settings that are functions or objects of the program, of which a file or a checkpoint keeps only the name."""
_DECIDED = {
    "batch_sampler": ("batch_size", "sampler", "shuffle", "drop_last"),
    "sampler": ("shuffle",),
}
"""What an order of the user's decides, so that no setting may."""


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
    `batch_sampler` a `KeyedLoader` in its order; both come back exactly. An `IterableDataset` gets a `StreamLoader`. Dividing
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
    is_iterable = isinstance(dataset, IterableDataset)
    yields = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    # What can only be iterated is taken for a loader of the user's.
    is_iterable_of_batches = yields and not is_iterable
    if is_iterable_of_batches or isinstance(dataset, TorchDataLoader):
        return dataset
    # A sampler may give labels or keys.
    by_place = settings.get("sampler") is None and settings.get("batch_sampler") is None
    check_read_by_place(dataset, split, by_place=by_place)
    _check_settings(dataset, settings, split=split, canonical=canonical)
    # Where updates have one size at any number of processes, so have the samples.
    keyed = settings.get("keyed")
    if not keyed:
        keyed = "batch" if settings.get("global_batch_size") is None else "sample"
    given, division = divide_updates(
        settings,
        split=split,
        train=train,
        world_size=world_size,
        accum_steps=accum_steps,
        canonical=canonical,
    )
    options = {
        "pin_memory": device is not None and pins_memory(device.type),
        **{name: value for name, value in given.items() if name not in _OPEN or value is not None},
        "keyed": keyed,
    }
    orders = [name for name in ("batch_sampler", "sampler") if name in options]
    # Evaluations have a division too, with gradient_sum='canonical'.
    divides_updates = division is not None and division.is_update
    if divides_updates and (is_iterable or orders):
        received = f"a {orders[0]}" if orders else type(dataset).__name__
        raise ValueError(
            f"Expected a map-style dataset and the library's own order for split {split!r}: dataloader.global_batch_size divides every "
            f"update over the ranks. Received: {received}, which divides itself. Set "
            "dataloader.batch_size, the samples of a batch on each rank, instead."
        )
    share = Share(split, seed, rank, world_size)
    if "batch_sampler" not in orders:
        options.setdefault("drop_last", train and options.get("batch_size", 1) is not None)
    try:
        if is_iterable:
            if not isinstance(dataset, IterDataPipe):
                return StreamLoader(dataset, share, **options)
            # torch shuffles and divides it by its type.
            del options["keyed"]
            options["worker_init_fn"] = WorkerInit(options.get("worker_init_fn"))
            return TorchDataLoader(dataset, **options)
        if orders:
            others = ", ".join(name for name in _DECIDED[orders[0]] if options.get(name))
            if others:
                raise ValueError(f"{orders[0]} decides {others}. Leave out: {others}.")
            return sampled_loader(dataset, share, **options)
        if isinstance(dataset, TokenBudget):
            sizes = [name for name in ("global_batch_size", "batch_size") if settings.get(name)]
            if sizes:
                raise ValueError(
                    f"Expected no batch size for split {split!r}: a TokenBudget makes batches of at most {dataset.limit} tokens. Received: "
                    f"dataloader.{sizes[0]}={settings[sizes[0]]!r}. Set dataloader.{split}.{sizes[0]} to None; accum_steps says how many "
                    "batches of each rank make an update."
                )
            collate = options.get("collate_fn") or dataset.collate
            options |= {"batch_size": None, "drop_last": False, "collate_fn": collate}
        # The order of a sampler or an iterable dataset is all there is; any other is shuffled.
        options.setdefault("shuffle", train and not isinstance(dataset, OrderedDataset))
        return DataLoader(dataset, share, pad=train, division=division, **options)
    except ValueError as error:
        if str(error).startswith("Expected"):
            raise
        # Of torch, such as that of a `prefetch_factor` without workers: it names neither the split nor the settings.
        raise ValueError(
            f"Expected dataloader settings of split {split!r} that go together. Received: {dict(settings)}. {error}"
        ) from error


def _check_settings(
    dataset: object, settings: Mapping[str, object], *, split: str, canonical: bool
) -> None:
    """Refuse settings of a split that no loader of the library can have, each by itself."""
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown:
        raise ValueError(
            f"Expected dataloader settings out of {sorted(SETTINGS)}. Received: {unknown[0]!r} for split {split!r}."
            f"{did_you_mean(unknown[0], [*SETTINGS, split])}"
        )
    for name in _OBJECTS:
        value = settings.get(name)
        if isinstance(value, str):
            raise ValueError(name_of_code(f"dataloader.{name}", value, f" of split {split!r}"))
    if settings.get("own_state"):
        raise ValueError(
            f"Expected a StatefulDataLoader in self.dataloaders[{split!r}] with dataloader.own_state=true. Received: a "
            f"{type(dataset).__name__}, for which the library makes the loader. Leave it out, or set dataloader.<split>.own_state for the "
            "splits that have one."
        )
    if canonical and isinstance(dataset, TokenBudget):
        raise ValueError(
            f"Expected micro-batches of a number of samples for split {split!r} with gradient_sum='canonical'. Received: a TokenBudget, "
            "whose batches have any number. Pack the documents with dl.data.Packed, or set gradient_sum='fast'."
        )
    for name in ("batch_size", *sorted(SIZES)):
        size = settings.get(name)
        is_open = size is None or (name == "micro_batch_size" and size == AUTO)
        is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
        if not is_open and not is_count:
            raise ValueError(
                f"Expected dataloader.{name} of split {split!r} to be a positive integer. Received: {name}={size!r} "
                f"({type(size).__name__})."
            )
    if settings.get("num_workers") and not settings.get("in_order", True):
        raise ValueError(
            f"Expected dataloader.in_order=True for split {split!r}: batches out of order leave no position to come "
            "back to. Received: in_order=False. Leave it out, or pass your own loader."
        )
    if settings.get("generator") is not None:
        raise ValueError(
            f"Expected no dataloader.generator for split {split!r}: its order follows from the run's seed. Received: "
            f"generator={settings['generator']!r}. Set `seed`, or pass your own `sampler`."
        )


def order_setting(sampler: object, settings: Mapping[str, object]) -> dict[str, object]:
    """Return the setting under which a sampler goes: `batch_sampler`, if it yields the batches themselves, else `sampler`.

    Args:
        sampler: A sampler or a batch sampler. A class of the user's own that yields lists is known as one where no `batch_size` is set.
        settings: The other settings of the split.
    """
    asks = "batch_size" not in settings or isinstance(sampler, BatchSampler)
    key = "batch_sampler" if asks and _yields_batches(sampler) else "sampler"
    return {key: sampler}


def _yields_batches(sampler: Any) -> bool:
    """Return whether a sampler yields lists of indices, the batches, and not single ones. A class of the user's own is asked for one."""
    if isinstance(sampler, BatchSampler):
        return True
    if hasattr(sampler, "__next__"):
        return False
    return isinstance(next(iter(copy.copy(sampler)), None), (list, tuple))


def divide_updates(
    settings: Mapping[str, Any],
    *,
    split: str,
    train: bool,
    world_size: int,
    accum_steps: int,
    canonical: bool = False,
) -> tuple[dict[str, Any], Division | None]:
    """Return the arguments of a loader, and with `global_batch_size` how an update is divided over ranks and micro-batches.

    A split that is not trained on has no updates. It may have a `batch_size` in addition to `global_batch_size`; without one, a
    rank holds as many samples at once as in training, which are known to fit into memory.

    Raises:
        ValueError: If the settings contradict one another, or there are more ranks than samples.
    """
    samples, micro_batch_size = settings.get("global_batch_size"), settings.get("micro_batch_size")
    # Settings that a program changes in its constructor are checked only here.
    if train and samples is not None and settings.get("batch_size") is not None:
        raise ValueError(
            f"Expected dataloader.batch_size or dataloader.global_batch_size, not both. Received: batch_size={settings['batch_size']!r}, "
            f"global_batch_size={samples!r} for split {split!r}. Set one of them to none."
        )
    most = micro_batch_size if isinstance(micro_batch_size, int) else None
    loading = {name: value for name, value in settings.items() if name not in OWN}
    division: Division
    if canonical:
        if not train:
            size = loading["batch_size"] = loading.get("batch_size") or most or 1
            return loading, WholeMicroBatches.of(
                size * world_size, world_size, size, is_update=False
            )
        if samples is None or most is None:
            raise ValueError(
                f"Expected dataloader.global_batch_size and an integer dataloader.micro_batch_size for split {split!r} with "
                f"gradient_sum='canonical', which adds micro-batches in one order. Received: global_batch_size={samples!r}, "
                f"micro_batch_size={micro_batch_size!r}. Set both, or gradient_sum='fast'."
            )
        division = WholeMicroBatches.of(samples, world_size, most, is_update=True)
    elif samples is None:
        if micro_batch_size is not None and train:
            raise ValueError(
                f"Expected dataloader.global_batch_size together with dataloader.micro_batch_size, which divides it. "
                f"Received: micro_batch_size={micro_batch_size!r} and no global_batch_size for split {split!r}. Set it, or leave "
                "micro_batch_size out: batch_size is the number of samples that a rank runs at once."
            )
        return loading, None
    else:
        if most is not None and accum_steps > 1:
            raise ValueError(
                f"Expected accum_steps or dataloader.micro_batch_size to set the number of micro-batches of an update. "
                f"Received: accum_steps={accum_steps}, micro_batch_size={micro_batch_size} for split {split!r}. Leave one of them out."
            )
        division = Division.of_update(
            samples, world_size, micro_batches=accum_steps, micro_batch_size=most
        )
        if not train:
            loading["batch_size"] = loading.get("batch_size") or division.micro_batch_size
            return loading, None
    loading.pop("batch_size", None)
    return loading, division
