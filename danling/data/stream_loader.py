"""The loader that the library reads iterable datasets with."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data._utils.collate import default_collate, default_convert
from torchdata.stateful_dataloader import StatefulDataLoader

from .collation import collate
from .keyed_stream import KeyedStream, generator_origins
from .plain_state import check_savable, is_stateful
from .replayed import Replayed, forgets_its_buffer
from .sampled_loader import TAKEN, is_plain_loader
from .sampler_state import SamplerState
from .workers import WorkerInit, end_with_process, quiet_torchdata

logger = logging.getLogger("danling")


class StreamLoader(StatefulDataLoader[Any]):  # type: ignore[misc]
    """A `StatefulDataLoader` over an iterable dataset, with its randomness keyed; see `KeyedStream`.

    Workers are made anew for each pass, so that what a pass is does not depend on what they read before. In this process
    the attributes that the dataset changes are carried from pass to pass, as those of a sampler are.

    Args:
        dataset: An iterable dataset.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process in the data domain.
        split: Name of the split.
        settings: Further arguments of `StatefulDataLoader`; `persistent_workers` has no effect.

    Raises:
        ValueError: If the dataset has a state that a checkpoint cannot hold.
    """

    next_iter_state: dict[str, Any] | None
    """The loaded state, until an iterator is made from it."""

    def __init__(self, dataset: object, *, seed: int = 0, rank: int = 0, split: str = "train", **settings: Any) -> None:
        self.split, self.seed, self.rank = split, seed, rank
        self.epoch = 0
        if forgets_its_buffer(dataset):
            dataset = Replayed(dataset)
        if is_stateful(dataset):
            check_savable(dataset, split)
        if settings.pop("persistent_workers", False) and settings.get("num_workers") and rank == 0:
            logger.info(
                "Split %r is an IterableDataset: its workers are made anew for each pass, to read alike.", split
            )
        collate_fn = settings.get("collate_fn")
        self._collate = None if collate_fn in (default_collate, default_convert) else collate_fn
        if collate_fn in (None, default_collate) and settings.get("batch_size", 1) is not None:
            settings["collate_fn"] = collate
        self.origins = generator_origins(dataset, self._collate)
        # A pass of `datasets` is a function of seed and epoch: what moves inside of it is made anew by the next one.
        held = () if isinstance(dataset, Replayed) else dataset
        self._state = None if is_stateful(dataset) else SamplerState(held, None)
        self._found: tuple[int, Mapping[str, Any]] | None = None
        self._resumed: Mapping[str, Any] | None = None
        """What the dataset was like when the run was saved, until the pass goes on from there."""
        self._warned = False
        settings["worker_init_fn"] = WorkerInit(settings.get("worker_init_fn"))
        with quiet_torchdata():
            super().__init__(dataset, **settings)
        if self.num_workers:
            end_with_process(self)

    @property
    def is_read_again(self) -> bool:
        """Whether a resumed pass is read from its beginning up to the position, since the dataset keeps no place itself."""
        return self._state is not None

    def set_epoch(self, epoch: int) -> None:
        """Prepare a pass: put the dataset back to how the pass found it, or note how it does."""
        self.epoch = epoch
        if self._state is None:
            return
        if self._found is not None and self._found[0] == epoch:
            self._state.restore(self._found[1])
            return
        self._found, self._resumed = (epoch, self._state.capture()), None
        changed = self._state.opaque_changes()
        if changed and not self._warned:
            self._warned = True
            logger.warning(
                "The dataset of split %r (%s) changes %s, which cannot be saved: a resumed run may read something else. "
                "Keep numbers, lists, tensors or generators there, or give it state_dict and load_state_dict.",
                self.split,
                type(self.dataset).__name__,
                ", ".join(changed),
            )

    def carried(self) -> dict[str, object]:
        """Return what a resumed run needs besides the place in the pass."""
        state: dict[str, Any] = {"origins": dict(self.origins)}
        if self._state is not None:
            current = self._state.capture()
            epoch, found = self._found or (self.epoch, current)
            state.update(epoch=epoch, found=found, current=current)
        return state

    def carry(self, state: Mapping[str, Any]) -> None:
        """Take over what `carried` returned."""
        self.origins = dict(state.get("origins", self.origins))
        if self._state is not None and "found" in state:
            self._found = int(state["epoch"]), state["found"]
            self._resumed = state["current"]
            self._state.restore(self._resumed)

    def _get_iterator(self) -> object:
        # The iterator sees the keyed view, whoever looks at `loader.dataset` sees the user's own dataset.
        view = copy.copy(self)
        view.__dict__["dataset"] = KeyedStream(
            self.dataset,
            self.seed,
            split=self.split,
            epoch=self.epoch,
            every=self.batch_size or 1,
            collate_fn=self._collate,
            origins=self.origins,
            speaks=self.rank == 0,
        )
        resumes = self.next_iter_state is not None
        iterator = super(StreamLoader, view)._get_iterator()
        self.next_iter_state = None
        if resumes:
            self._go_on_as_saved()
        return iterator

    def _go_on_as_saved(self) -> None:
        # The pass was found again from how it began. Where it was read to its end, or its iterator has a state, nothing
        # was read again that would have changed the dataset as the pass did.
        resumed, self._resumed = self._resumed, None
        if self._state is not None and resumed is not None:
            self._state.restore(resumed)


def is_stream(loader: object) -> bool:
    """Return whether a loader of the user's is one of torch or torchdata over an iterable dataset, as it was made."""
    dataset = getattr(loader, "dataset", None)
    return is_plain_loader(loader) and isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)


def stream_twin(loader: Any, *, split: str, seed: int, rank: int = 0) -> StreamLoader:
    """Return a loader that reads what a loader of the user's does, with randomness keyed. The user's own is not touched.

    Args:
        loader: For which `is_stream` holds.
        split: Name of the split.
        seed: Base seed, the same on all ranks.
        rank: Coordinate of this process in the data domain.
    """
    names = {*TAKEN, "batch_size", "drop_last", "collate_fn", "snapshot_every_n_steps"}
    settings = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if not loader.num_workers:
        settings = {name: value for name, value in settings.items() if name not in ("prefetch_factor", "timeout")}
    return StreamLoader(loader.dataset, split=split, seed=seed, rank=rank, **settings)
