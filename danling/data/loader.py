"""The loader the library builds for map-style datasets: its position is three integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .keyed import KeyedLoader
from .order import OrderedDataset
from .sampler import PositionedBatchSampler
from .shares import Division
from .windows import Batch


class DataLoader(KeyedLoader):
    """A loader whose position is restored exactly.

    Its state is (seed, epoch, consumed), which determines everything that is read: the number of workers, their
    prefetched batches and the number of ranks do not matter. Iterating begins at the position; the position moves when
    `advance` says that batches were consumed. `len(loader)` is the number of batches of a whole pass on this rank.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples of a batch on each rank; `None` delivers items as they are, without collation.
        division: How whole updates are divided over ranks and micro-batches; takes the place of `batch_size`.
        shuffle: Permute the samples anew in each epoch.
        drop_last: Leave out the last global batch if it is not full.
        pad: Give a rank for which nothing is left of the last global batch one sample of weight zero, instead of
            nothing.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process among those that share the dataset.
        world_size: Number of them.
        split: Name of the split, for messages.
        collate_fn: Makes a batch of a list of samples; `None` is torch's, with samples of some libraries put together by these.
        num_workers: Worker processes.
        worker_init_fn: Called with its id in every worker.
        settings: Further arguments of `torch.utils.data.DataLoader`.

    Raises:
        ValueError: If the dataset is empty, smaller than one global batch while ragged ones are dropped, or a setting
            is not one that an exact position allows.
    """

    order: PositionedBatchSampler

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = 1,
        division: Division | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        pad: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        split: str = "train",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.split = split
        if shuffle and isinstance(dataset, OrderedDataset):
            raise ValueError(
                f"Expected no dataloader.shuffle for split {split!r}: a {type(dataset).__name__} has its own order. Received: "
                "shuffle=True. Leave it out."
            )
        length = _checked_length(dataset, split)
        check_settings(settings, num_workers, split)
        self.order = PositionedBatchSampler(
            length,
            batch_size=_checked_batch_size(batch_size, split),
            division=division,
            shuffle=shuffle,
            drop_last=drop_last,
            pad=pad,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self._check_not_empty()
        super().__init__(
            dataset,
            self.order,
            batch_size=batch_size if division is None else division.micro_batch_size,
            drop_last=drop_last,
            split=split,
            batched=batch_size is not None,
            collate_fn=collate_fn,
            num_workers=num_workers,
            worker_init_fn=worker_init_fn,
            **settings,
        )

    def _check_not_empty(self) -> None:
        plan = self.order
        if plan.drop_last and plan.length < plan.global_batch_size:
            whole = plan.division.is_update
            key = "global_batch_size" if whole else "batch_size"
            factors = "" if whole else f" (batch_size {plan.batch_size} x {plan.world_size} ranks)"
            raise ValueError(
                f"Expected split {self.split!r} to hold at least one {'update' if whole else 'global batch'} of "
                f"{plan.global_batch_size} samples{factors}, since drop_last=True. Received: {plan.length} samples. "
                f"Lower dataloader.{key}, or set dataloader.drop_last to False."
            )

    # Position

    @property
    def length(self) -> int:
        """Samples of a pass, as the dataset had them when the pass began."""
        return self.order.length

    def take_length(self) -> None:
        """Take over the length that the dataset has now. Call between two passes."""
        self.order.length = _checked_length(self.dataset, self.split)
        self._check_not_empty()
        self.close()  # workers that are kept hold a copy of the dataset

    @property
    def remaining_batches(self) -> int:
        """Batches on this rank from the position to the end of the pass."""
        return self.order.num_batches(self.consumed)

    @property
    def division(self) -> Division | None:
        """How updates are divided; `None` where `accum_steps` says how many batches make one."""
        return self.order.division if self.order.division.is_update else None

    @property
    def num_updates(self) -> int | None:
        """Updates of a whole pass; `None` where `accum_steps` says how many batches make one."""
        return self.order.num_stretches(0) if self.division is not None else None

    @property
    def held_at_once(self) -> int:
        """The most samples that a rank holds at once of the next update; 0 at the end of the pass."""
        return self.order.division.largest(self.order.next_stretch)

    def hold_at_most(self, samples: int) -> None:
        """Cut updates into micro-batches of at most so many samples, from the next iterator on. Call on all ranks."""
        self.order.division = self.order.division.capped(samples)
        self.__dict__.update(batch_size=self.order.division.micro_batch_size)

    def micro_batches(self, data: Iterable[Any]) -> Iterator[Batch]:
        """Yield the batches from the position on, with their sample counts and places. Padding has 0 samples."""
        plan = self.order
        for each, (samples, total), closes, place, ordinal in zip(
            data, plan.counts(), plan.closings(), plan.places(), plan.ordinals()
        ):
            known: tuple[int | None, int | None] = (samples, total)
            if self.batch_size is None:  # only the dataset knows how many samples an item holds
                known = (None if samples else 0, None)
            yield Batch(each, *known, closes, (place,), ordinal)

    def advance(self, batches: int) -> None:
        """Move the position: an update consumed `batches` batches of each rank."""
        self.order.consumed = self.order.position_after(self.order.consumed, batches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self.order.epoch, self.order.consumed = epoch, 0

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what tells whether it fits."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "length": self.order.length,
            "end": self.order.end,
            "shuffle": self.order.shuffle,
            **({"order": self.dataset.fingerprint(self.epoch)} if isinstance(self.dataset, OrderedDataset) else {}),
            **self.held_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position. Another batch size, number of workers or world size does not matter.

        Raises:
            ValueError: If the dataset has another length, or the order is another one.
        """
        self._check_fits(state_dict)
        if state_dict["seed"] != self.seed:
            # Workers that are kept hold a copy of the old seed.
            self.close()
        self.order.seed = state_dict["seed"]
        self.order.epoch = state_dict["epoch"]
        # Between two passes, the dataset may have got another length.
        self.order.consumed = self.order.end if self._is_over(state_dict) else state_dict["consumed"]
        self.load_held_state(state_dict)

    def _is_over(self, state: Mapping[str, Any]) -> bool:
        return bool(state["consumed"]) and state["consumed"] >= state.get("end", state["length"])

    def _check_fits(self, state: Mapping[str, Any]) -> None:
        missing = sorted({"seed", "epoch", "consumed", "length", "shuffle"} - state.keys())
        if missing:
            raise ValueError(
                f"Expected the position of split {self.split!r}. Received: a state without {', '.join(missing)} "
                f"(keys={sorted(state)}). It was saved by another kind of loader; exclude 'dataloaders' from loading."
            )
        length = self.order.length
        if state["length"] != length and state["consumed"] and not self._is_over(state):
            raise ValueError(
                f"Expected split {self.split!r} to have {state['length']} samples, as when its position was saved. "
                f"Received: {length} samples. Restore the dataset, or exclude 'dataloaders' from loading to start the "
                "epoch anew."
            )
        if isinstance(self.dataset, OrderedDataset) and "order" in state:
            self.dataset.check_fingerprint(state["order"], state["epoch"], self.split)
        if not 0 <= state["consumed"] <= state["length"]:
            raise ValueError(
                f"Expected a position of split {self.split!r} between 0 and {length}. Received: "
                f"consumed={state['consumed']}."
            )
        if state["consumed"] and bool(state["shuffle"]) != self.order.shuffle:
            raise ValueError(
                f"Expected shuffle={state['shuffle']} for split {self.split!r}, as when its position was saved within "
                f"an epoch. Received: shuffle={self.order.shuffle}. Restore the setting, or exclude 'dataloaders' "
                "from loading."
            )


def _checked_length(dataset: Any, split: str) -> int:
    try:
        length = len(dataset)
    except TypeError as error:
        raise ValueError(
            f"Expected the dataset of split {split!r} to have a length. Received: {type(dataset).__name__} without "
            "__len__. Define it, make it an IterableDataset, or pass your own loader."
        ) from error
    if length < 1:
        raise ValueError(
            f"Expected split {split!r} to have samples. Received: an empty dataset ({type(dataset).__name__} of length "
            "0). Check the path or the filter it is made with, or leave the split out."
        )
    return length


def _checked_batch_size(batch_size: int | None, split: str) -> int:
    if batch_size is None:
        return 1
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ValueError(
            f"Expected dataloader.batch_size of split {split!r} to be a positive integer or None. "
            f"Received: batch_size={batch_size!r} ({type(batch_size).__name__})."
        )
    return batch_size


def check_settings(settings: Mapping[str, object], num_workers: int, split: str) -> None:
    """Raise a `ValueError` for a setting that an exact position does not allow."""
    if num_workers and not settings.get("in_order", True):
        raise ValueError(
            f"Expected dataloader.in_order=True for split {split!r}: batches out of order leave no position to come "
            "back to. Received: in_order=False. Leave it out, or pass your own loader."
        )
    if settings.get("generator") is not None:
        raise ValueError(
            f"Expected no dataloader.generator for split {split!r}: its order follows from the run's seed. Received: "
            f"generator={settings['generator']!r}. Set `seed`, or pass your own `sampler`."
        )
