"""What can be learnt about, and told to, a loader that the user made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from .randomness import preserved_random_state


def call_set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers and its dataset, wherever it exists."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    distinct = {id(holder): holder for holder in (*holders, getattr(loader, "dataset", None))}
    for holder in distinct.values():
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _generators(loader: Any) -> dict[str, Any]:
    """Return the loader's own generators by where they are held."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders: Iterable[tuple[str, Any]] = (
        ("loader", loader),
        ("sampler", getattr(loader, "sampler", None)),
        ("batch_sampler", batch_sampler),
        ("batch_sampler.sampler", getattr(batch_sampler, "sampler", None)),
    )
    found = {name: getattr(holder, "generator", None) for name, holder in holders}
    return {name: generator for name, generator in found.items() if hasattr(generator, "get_state")}


def generator_states(loader: Any) -> dict[str, Tensor]:
    """Return the states of the torch generators that the user gave a loader or its samplers."""
    return {name: generator.get_state() for name, generator in _generators(loader).items()}


def set_generator_states(loader: Any, states: Mapping[str, Tensor]) -> None:
    """Put the loader's own generators into saved states."""
    for name, generator in _generators(loader).items():
        if name in states:
            generator.set_state(states[name].cpu())


def order_is_of_rank(loader: Any) -> bool:
    """Return whether each rank may seed the order by itself.

    Another sampler may draw one permutation for all ranks and take a part of it, for which all must draw the same.
    """
    return type(getattr(loader, "sampler", None)) in (RandomSampler, SequentialSampler, DistributedSampler)


def first_sample(loader: Any) -> Any:
    """Return the first sample of the dataset, where the loader reads all of it in an order of its own; else `None`.

    Random streams are left as they are.
    """
    if not isinstance(loader, TorchDataLoader) or type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return None
    try:
        with preserved_random_state(seed=0):
            return loader.dataset[0]
    except (LookupError, TypeError, NotImplementedError):
        return None


def shares_evenly(loader: Any) -> bool:
    """Return whether the loader's sampler gives every rank the same number of samples."""
    return isinstance(loader, TorchDataLoader) and isinstance(loader.sampler, DistributedSampler)


def equalize_draws(loader: Any) -> None:
    """Draw what torch draws when it starts workers, if it will not start any because it has kept them.

    Without it the order of a pass would depend on whether the workers are new, as they are in a resumed run.
    """
    kept = getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is not None
    if kept and isinstance(loader, TorchDataLoader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
