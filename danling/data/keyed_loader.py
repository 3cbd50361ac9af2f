"""What the loaders of the library over map-style datasets share: keyed reading that leaves training's streams alone."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from .collation import collate
from .dataset_state import DatasetState, Stamped
from .generators import Generators
from .host_streams import HOST_STREAMS
from .keyed import KeyedDataset, draws_nothing, reading_roots
from .mixture import Mixture
from .reading_code import may_look_at_streams
from .watched_reading import SeenDraws, WatchedReading, as_is
from .workers import WorkerInit, end_with_process, quiet_torchdata, shut_down_workers

logger = logging.getLogger("danling")


class KeyedLoader(StatefulDataLoader[Any]):  # type: ignore[misc]
    """A `StatefulDataLoader` whose sampler yields keys (epoch, index), with the randomness of a sample keyed by them.

    Only its order and position are left to subclasses.

    Args:
        dataset: A map-style dataset.
        keys: Yields keys, or lists of them.
        batch_size: As the user gave it; `None` delivers items as they are, and `keys` yields single ones.
        drop_last: As the user gave it.
        split: Name of the split, for messages.
        collate_fn: Makes a batch of a list of samples; `None` is `danling.data.collation.collate`.
        num_workers: Worker processes.
        worker_init_fn: Called with its id in every worker.
        settings: Further arguments of `StatefulDataLoader`.
    """

    def __init__(
        self,
        dataset: object,
        keys: Sampler[Any],
        *,
        batch_size: int | None,
        drop_last: bool,
        split: str,
        batched: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.split = split
        name_uncontrollable(dataset, collate_fn, split)
        self._collates = collate_fn is not None
        self._draws = self._collates or not draws_nothing(dataset)
        self._seen_draws = SeenDraws()
        self._looked = False
        # Torch draws the workers' first seeds from it, and starting a pass must not touch training's stream. The
        # position is the whole state, so nothing is to be fetched from workers for it.
        self.dataset_state = DatasetState(dataset, split, num_workers)
        settings.update(generator=torch.Generator().manual_seed(0), snapshot_every_n_steps=0)
        with quiet_torchdata():
            super().__init__(
                dataset,
                batch_size=1 if batched else None,
                **{"batch_sampler" if batched else "sampler": keys},
                collate_fn=collate if collate_fn is None and batched else collate_fn,
                num_workers=num_workers,
                worker_init_fn=WorkerInit(worker_init_fn),
                **settings,
            )
        # torch forgets both when it is given a batch sampler, and refuses to have them set.
        self.__dict__.update(batch_size=batch_size, drop_last=drop_last)
        if num_workers:
            end_with_process(self)

    @property
    def seed(self) -> int:
        """Base seed of order and randomness."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The pass that the position is in."""
        raise NotImplementedError

    @property
    def consumed(self) -> int:
        """How far the pass is consumed, 0 at its beginning."""
        raise NotImplementedError

    def __iter__(self) -> Any:
        """Return an iterator over the batches from the position to the end of the pass."""
        told = hasattr(self.dataset, "set_epoch")
        if isinstance(self.dataset, Mixture):
            self.dataset.set_seed(self.seed)
        if told:
            self.dataset.set_epoch(self.epoch)
        if told or self.dataset_state:
            # Persistent workers hold copies of the dataset that would not hear of it.
            shut_down_workers(self)
        if self.dataset_state:
            self.dataset_state.begin(first=not self.consumed)
        if not self.num_workers and not self.pin_memory:
            return self._read_here()
        iterator = super().__iter__()
        if self.dataset_state and self.num_workers:
            return self.dataset_state.unwrapped(iterator)
        return _shielded(iterator) if self._draws and not self.num_workers else iterator

    def _get_iterator(self) -> Any:
        # The iterator sees keys, whoever looks at `loader.dataset` sees the user's own dataset.
        view = copy.copy(self)
        view.__dict__["dataset"], view.__dict__["collate_fn"] = self._reading()
        self._look_at_code()
        if self.dataset_state and self.num_workers:
            view.__dict__["collate_fn"] = Stamped(view.collate_fn, self.dataset)
        return super(KeyedLoader, view)._get_iterator()

    def _look_at_code(self) -> None:
        """Look once at the code that reads, so that forked workers, which are new ones in each pass, begin with what is known of it."""
        context = self.multiprocessing_context or multiprocessing
        if self.num_workers and self._draws and not self._looked and context.get_start_method() == "fork":
            self._looked = True
            may_look_at_streams(reading_roots(self.dataset, self.collate_fn if self._collates else None))

    def _reading(self) -> tuple[KeyedDataset | WatchedReading, Callable[[Any], Any]]:
        """Return what reads the items of keys, and what makes a batch of them."""
        collate_fn: Callable[[Any], Any] = self.collate_fn
        keyed = KeyedDataset(
            self.dataset,
            self.seed,
            collates=self._collates,
            collate_fn=collate_fn,
            states=self.dataset_state.of_workers,
        )
        if not self._draws:
            return keyed, collate_fn
        watched = WatchedReading(keyed, collate_fn if self._collates else None, self._seen_draws)
        return watched, as_is if self._collates else collate_fn

    def _read_here(self) -> Iterator[object]:
        """Read in this process, without the bookkeeping that torchdata has for a position of its own."""
        reading, collate_fn = self._reading()
        batched = self.batch_sampler is not None
        read = reading.__getitems__ if batched else reading.__getitem__
        # Taken here and not where the first batch is asked for: moving the position must not disturb the iterator.
        keys = iter(self.batch_sampler if batched else self.sampler)
        # Not a chain of `map`: that takes a StopIteration of the user's for its own end.
        batches = (collate_fn(read(key)) for key in keys)
        return _shielded(batches) if self._draws else batches

    def held_state(self) -> dict[str, object]:
        """Return the state that the dataset has of its own, under `dataset`; nothing where it has none."""
        return {"dataset": self.dataset_state.state_dict()} if self.dataset_state else {}

    def load_held_state(self, state: Mapping[str, Any]) -> None:
        """Put the dataset into the state that `held_state` returned.

        Raises:
            ValueError: If there is none, or it was kept by another number of workers.
        """
        if self.dataset_state and "dataset" not in state:
            raise ValueError(
                f"Expected the state of the dataset of split {self.split!r}, which has state_dict. Received: a position "
                f"without it (keys={sorted(state)}). Restore the dataset that the run was saved with, or exclude "
                "'dataloaders' from loading."
            )
        if self.dataset_state:
            self.dataset_state.load_state_dict(state["dataset"], within=self.consumed > 0)

    def close(self) -> None:
        """End the worker processes; the loader can be iterated again."""
        shut_down_workers(self)


_named: weakref.WeakSet[Any] = weakref.WeakSet()
"""Datasets of which has been said what cannot be keyed."""


def name_uncontrollable(dataset: object, collate_fn: object, split: str) -> None:
    """Say once what reading depends on that can neither be keyed nor saved.

    Args:
        dataset: The dataset.
        collate_fn: The user's, or `None`.
        split: Name of the split.
    """
    roots = reading_roots(dataset, collate_fn)
    found = Generators(roots).uncontrollable if roots else []
    if not found:
        return
    with suppress(TypeError):  # what cannot be referred to weakly is named each time
        if dataset in _named:
            return
        _named.add(dataset)
    logger.warning(
        "Reading split %r depends on %s, which can neither be seeded nor saved: after a resume the samples that use it "
        "differ. Draw from torch, NumPy or `random`, or from a generator of these held as an attribute; make an iterator "
        "anew for each sample.",
        split,
        ", ".join(f"{path} ({kind})" for path, kind in found),
    )


def _shielded(iterator: Iterator[object]) -> Iterator[object]:
    """Read in this process, and put its streams back after each fetch, collation included."""
    while True:
        streams = HOST_STREAMS.save()
        try:
            data = next(iterator)
        except StopIteration:
            return
        finally:
            HOST_STREAMS.put_back(streams)
        yield data
        del data  # or it would stay in memory while the next one is made
