"""The loader that reads a map-style dataset in the order of a sampler of the user's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset
from torch.utils.data._utils.collate import default_collate, default_convert
from torchdata.stateful_dataloader import StatefulDataLoader

from .keyed_loader import KeyedLoader
from .sampled import SampledBatches
from .sampler import KeySampler


class SampledLoader(KeyedLoader):
    """A loader whose order is that of a sampler, and whose position and randomness come back exactly.

    The sampler is not divided over ranks: that is its own business. Randomness is keyed by (seed, epoch, index), as in
    `danling.data.DataLoader`, so the number of workers does not matter.

    Args:
        dataset: A map-style dataset, or anything that takes what the sampler yields.
        sampler: Yields indices.
        batch_sampler: Yields lists of indices, instead of `sampler`.
        batch_size: Samples of a batch on this rank; `None` delivers items as they are.
        drop_last: Leave out a last batch that is not full.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process in the data domain.
        world_size: Size of the data domain.
        split: Name of the split.
        settings: Further arguments of `StatefulDataLoader`.

    Raises:
        ValueError: If both samplers are given, or `batch_sampler` with what it decides.
    """

    def __init__(
        self,
        dataset: object,
        *,
        sampler: object = None,
        batch_sampler: object = None,
        batch_size: int | None = 1,
        drop_last: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: str = "train",
        **settings: Any,
    ) -> None:
        batched = batch_sampler is not None
        self.order = SampledBatches(
            batch_sampler if batched else sampler,
            batched=batched,
            dataset=dataset,
            batch_size=batch_size or 1,
            drop_last=drop_last,
            seed=seed,
            split=split,
            rank=rank,
            world_size=world_size,
        )
        batched = batched or batch_size is not None
        super().__init__(
            dataset,
            self.order if batched else KeySampler(self.order),
            batch_size=batch_size,
            drop_last=drop_last,
            split=split,
            batched=batched,
            **settings,
        )

    @property
    def seed(self) -> int:
        """Base seed of order and randomness."""
        return self.order.seed

    @property
    def epoch(self) -> int:
        """The pass that the position is in."""
        return self.order.epoch

    @property
    def consumed(self) -> int:
        """Batches of the pass that are consumed on this rank."""
        return self.order.batches

    def advance(self, batches: int) -> None:
        """Move the position by so many batches."""
        self.order.advance(batches)
        self.dataset_state.advance(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and how the pass found the sampler."""
        return {**self.order.state_dict(), **self.held_state()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Go to a position. Another number of workers does not matter.

        Raises:
            ValueError: If the sampler has another length.
        """
        if state_dict["seed"] != self.seed:
            # Workers that are kept hold a copy of the old seed.
            self.close()
        self.order.load_state_dict(state_dict)
        self.load_held_state(state_dict)


TAKEN = (
    frozenset(inspect.signature(TorchDataLoader.__init__).parameters)
    & frozenset(inspect.signature(StatefulDataLoader.__init__).parameters)
) - {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"}


def can_be_keyed(loader: Any) -> bool:
    """Return whether a loader of the user's is one of torch or torchdata over a map-style dataset, as it was made.

    What a subclass does is not known, and batches that come as workers finish have no order to come back to.
    """
    return is_plain_loader(loader) and not isinstance(loader.dataset, IterableDataset)


def is_plain_loader(loader: Any) -> bool:
    """Return whether a loader is one of torch or torchdata, no subclass, that gives its batches in order."""
    if type(loader) not in (TorchDataLoader, StatefulDataLoader):
        return False
    return bool(getattr(loader, "in_order", True)) or not loader.num_workers


def keyed_twin(loader: Any, *, split: str, seed: int, rank: int = 0, world_size: int = 1) -> SampledLoader:
    """Return a loader that reads what a loader of the user's does, in the order of its sampler, with randomness keyed.

    The user's own is not touched: its dataset, samplers and functions are used as they are.

    Args:
        loader: For which `can_be_keyed` holds.
        split: Name of the split.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process in the data domain.
        world_size: Size of the data domain.
    """
    settings = {name: getattr(loader, name) for name in TAKEN if hasattr(loader, name)}
    if loader.collate_fn not in (default_collate, default_convert):
        settings["collate_fn"] = loader.collate_fn
    if not loader.num_workers:
        settings = {name: value for name, value in settings.items() if name not in ("prefetch_factor", "timeout")}
    batched = loader.batch_sampler is not None
    twin = SampledLoader(
        loader.dataset,
        **{"batch_sampler" if batched else "sampler": loader.batch_sampler if batched else loader.sampler},
        batch_size=1 if batched else None,
        split=split,
        seed=seed,
        rank=rank,
        world_size=world_size,
        **settings,
    )
    twin.__dict__.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    return twin
