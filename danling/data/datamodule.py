"""Splits from a `LightningDataModule`: its loaders, and the datasets behind those whose order the library can take over."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from itertools import chain, count
from typing import Any

from torch import distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils.collate import default_collate, default_convert

from danling.distributed import LaunchEnvironment, default_store

from .sampled import is_plain_loader, taken_from

logger = logging.getLogger("danling")

STAGES = {"train": "fit", "val": "fit", "test": "test", "predict": "predict"}
"""The stage that a data module is set up for, by split; the loader of a split is `{split}_dataloader`."""
_PAUSE_SECONDS = 0.05
_LIBRARY = ("lightning", "pytorch_lightning", "lightning_fabric")
_IGNORED = {
    "`to_device` of the runner": (
        "transfer_batch_to_device",
        "on_before_batch_transfer",
        "on_after_batch_transfer",
    ),
    "`state_dict` and `load_state_dict` of the dataset": ("state_dict", "load_state_dict"),
    "`state_dict` and `load_state_dict` of the runner": (
        "on_save_checkpoint",
        "on_load_checkpoint",
    ),
}
"""Where belongs here what hooks of a data module do that only a trainer calls."""


class LoaderSettings:
    """A dataset with the settings that its loader was made with: in `self.datasets` it replaces the dataset.

    Settings in the section `dataloader.<split>` come before these, and these before the ones in `dataloader` that all splits share.

    Args:
        dataset: A map-style dataset.
        settings: Arguments of a loader, by the names that they have under `dataloader`.
    """

    def __init__(self, dataset: Any, settings: Mapping[str, object]) -> None:
        self.dataset = dataset
        self.settings = dict(settings)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]


def from_datamodule(
    datamodule: Any, *, splits: Iterable[str] | str | None = None
) -> dict[str, Any]:
    """Return the splits of a `LightningDataModule` for `self.datasets`, called as a trainer calls it.

    `prepare_data` is called in one process of each machine while the others wait (with `prepare_data_per_node=False` in one of all),
    then `setup(stage)` in all of them, once a stage. Returns by split:

    - Of a `torch.utils.data.DataLoader` over a map-style dataset in torch's own order, the dataset and the settings of the loader. The
      library divides it over the processes, shuffles it by the run's seed, and resumes it at once, where a trainer puts a
      `DistributedSampler` in the place of the sampler.
    - Any other loader as it is: one with your own sampler, over an `IterableDataset`, or of another class. It divides itself.

    A list or a mapping of loaders to evaluate makes a split of each, `val_0`, `val_1` or `val_<name>`. Call it after
    `super().__init__(config)`, which joins the processes. Called on all ranks.

    Args:
        datamodule: A data module, or any object with its methods; nothing else of Lightning is needed.
        splits: One or several out of `"train"`, `"val"`, `"test"` and `"predict"`; by default all that it has a loader for.

    Returns:
        What `self.datasets` takes.

    Raises:
        ValueError: If there is no such loader, or those to train on are several.
        RuntimeError: If `prepare_data` failed in another process.

    Examples:
        >>> self.datasets = dl.data.from_datamodule(MyDataModule("data"))  # doctest: +SKIP
    """

    def is_own(name: str) -> bool:
        """Whether a method is the user's, and not one of Lightning that does nothing or fails."""
        method = getattr(type(datamodule), name, None)
        own = (
            callable(method) and getattr(method, "__module__", "").partition(".")[0] not in _LIBRARY
        )
        return own or name in vars(datamodule)  # as `LightningDataModule.from_datasets` sets it

    launch = LaunchEnvironment.read()
    kind = type(datamodule).__name__
    present = [split for split in STAGES if is_own(f"{split}_dataloader")]
    if splits is None:
        asked = present
    elif isinstance(splits, str):
        asked = [splits]
    else:
        asked = list(splits)
    unknown = [split for split in asked if split not in present]
    if unknown or not asked:
        methods = " or ".join(f"{split}_dataloader" for split in unknown or STAGES)
        raise ValueError(
            f"Expected a data module with a method {methods}. Received: {kind}, which has loaders for {present or 'no split'}. Define it, "
            "or name others in `splits`."
        )
    ignored = {
        place: hooks for place, names in _IGNORED.items() if (hooks := list(filter(is_own, names)))
    }
    if ignored and launch.rank == 0:
        logger.warning(
            "%s defines %s, which only a trainer of Lightning calls: nothing calls it here. What it does belongs into %s.",
            kind,
            ", ".join(chain.from_iterable(ignored.values())),
            "; ".join(ignored),
        )
    _prepare(datamodule, launch)
    for stage in dict.fromkeys(STAGES[split] for split in asked):
        if callable(getattr(datamodule, "setup", None)):
            datamodule.setup(stage)
    found: dict[str, Any] = {}
    for split in asked:
        found.update(_named(split, getattr(datamodule, f"{split}_dataloader")()))
    return {split: _taken_over(loader) for split, loader in found.items()}


def _prepare(datamodule: Any, launch: LaunchEnvironment) -> None:
    """Call `prepare_data` where it is due, and wait for it; a failure is raised on all ranks."""
    every_node = getattr(datamodule, "prepare_data_per_node", True)
    error: Exception | None = None
    failed = ""
    rank = launch.local_rank if every_node else launch.rank
    if rank == 0 and callable(getattr(datamodule, "prepare_data", None)):
        try:
            datamodule.prepare_data()
        except Exception as failure:
            # Raised below: the other ranks wait for the outcome.
            error, failed = failure, f"{type(failure).__name__}: {failure}"
    if launch.world_size > 1 and dist.is_initialized():
        failed = _agreed(failed, launch)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            f"Expected {type(datamodule).__name__}.prepare_data to succeed. Received: {failed}. See the traceback of that rank."
        )


_rounds = count()


def _agreed(failure: str, launch: LaunchEnvironment) -> str:
    """Wait for all ranks, and return what failed on one of them.

    By the store and not by a collective: preparing data may take hours, and a collective has a time limit.
    """
    store = default_store()
    key = f"danling/prepare_data/{next(_rounds)}"
    if failure:
        store.set(f"{key}/failed", f"{failure} on rank {launch.rank}")
    store.add(f"{key}/arrived", 1)
    while store.add(f"{key}/arrived", 0) < launch.world_size:
        time.sleep(_PAUSE_SECONDS)
    if not store.check([f"{key}/failed"]):
        return ""
    failure = bytes(store.get(f"{key}/failed")).decode()
    store.add(f"{key}/told", 1)
    # The store lives in the process of the first rank, which therefore ends only when the others have read what failed.
    while launch.rank == 0 and store.add(f"{key}/told", 0) < launch.world_size:
        time.sleep(_PAUSE_SECONDS)
    return failure


def _named(split: str, loaders: Any) -> dict[str, Any]:
    if isinstance(loaders, Mapping):
        several = {f"{split}_{name}": loader for name, loader in loaders.items()}
    elif isinstance(loaders, (list, tuple)):
        several = {f"{split}_{number}": loader for number, loader in enumerate(loaders)}
    else:
        return {split: loaders}
    if len(several) == 1:
        return {split: next(iter(several.values()))}
    if split == "train":
        raise ValueError(
            f"Expected train_dataloader to return one loader. Received: {len(several)}, of which a trainer makes one batch. Make one "
            "dataset of them, such as torch's StackDataset or a danling.data.Mixture."
        )
    return several


def _taken_over(loader: Any) -> Any:
    """Return the dataset of a loader with its settings, or the loader where its order is its own."""
    if not is_plain_loader(loader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    if type(batches) not in (BatchSampler, type(None)):
        return loader
    # A loader that was handed a batch sampler also has a sampler and a batch size that it does not use.
    order = loader if batches is None else batches
    sampler = order.sampler
    in_turn, at_random = type(sampler) is SequentialSampler, type(sampler) is RandomSampler
    draws_otherwise = at_random and (
        sampler.replacement or sampler.generator is not None or sampler._num_samples is not None
    )
    is_usual = (in_turn or at_random) and not draws_otherwise
    if not is_usual or sampler.data_source is not loader.dataset:
        return loader
    settings = taken_from(loader)
    settings |= {"batch_size": order.batch_size, "shuffle": at_random, "drop_last": order.drop_last}
    usual = default_convert if batches is None else default_collate
    if loader.collate_fn is not usual:
        settings["collate_fn"] = loader.collate_fn
    # Only what the program has set, so that the section `dataloader` decides all else.
    defaults = vars(TorchDataLoader(loader.dataset))
    changed = {
        name: value
        for name, value in settings.items()
        if name not in defaults or value != defaults[name]
    }
    return LoaderSettings(
        loader.dataset,
        # These two in any case: a loader of torch keeps a smaller last batch unless it is told
        # otherwise, and one of the library drops it in training.
        {**changed, **{name: settings[name] for name in ("batch_size", "drop_last")}},
    )
