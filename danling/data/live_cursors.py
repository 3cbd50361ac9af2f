"""Where a pass over a user's own loader is."""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from .cursors import Batch, Cursor
from .generators import Generators
from .host_streams import HOST_STREAMS
from .randomness import derive_seed, preserved_random_state, seed_host_streams
from .sampler_state import counts_passes
from .stream_loader import StreamLoader
from .user_loader import (
    call_set_epoch,
    equalize_draws,
    fingerprint,
    order_is_of_rank,
    say_order_differs,
    shares_evenly,
)
from .workers import end_with_process, kept_from_group_signals, shut_down_workers

logger = logging.getLogger("danling")

_END = object()


class LiveCursor(Cursor):
    """Position in a loader of the user's: `consumed` counts batches of this rank.

    The loader's iterator is kept for as long as the pass lasts, since calling `iter` again would begin anew. A pass is
    begun with the streams seeded from (seed, split, epoch), so that a sampler that draws its order from them draws it
    again when the run is resumed, and the streams are put back, so that beginning a pass leaves no trace in training.
    """

    is_rank_local = True

    def __init__(self, loader: object, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(loader, split=split, rank=rank, world_size=world_size, seed=seed)
        self.epoch = 0
        self.consumed = 0
        self._fetched = 0
        self._live: Iterator[Any] | None = None
        self._exhausted = False
        self._found: dict[str, Any] | None = None
        """States of the loader's own generators as the pass found them; `None` before it has begun."""
        self._own = Generators({"loader": loader} if type(loader) not in (list, tuple, range) else {})

    @property
    def even(self) -> bool:
        """Whether there is one rank only, or a sampler that gives each the same number."""
        return self.world_size == 1 or shares_evenly(self.loader)

    def num_batches(self) -> int | None:
        """Return `len(loader)`; `None` if it has none or can only guess."""
        if isinstance(getattr(self.loader, "dataset", None), IterableDataset):
            return None
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def remaining_batches(self) -> int | None:
        """Return the batches from the position on, `None` if unknown."""
        if self._exhausted:
            return 0
        total = self.num_batches()
        return None if total is None else max(total - self.consumed, 0)

    def batches(self) -> Iterator[Batch]:
        """Yield the batches from the position on."""
        if self._exhausted:
            return
        if self._live is None or self._fetched != self.consumed:
            self._live = self._begin()
        try:
            while (data := self._fetch(self._live, self._fetched)) is not _END:
                self._fetched += 1
                yield Batch(data, None, None, place=(self.rank, self._fetched - 1))
        except Exception:
            # What raised would end quietly when asked again, as if the pass were over.
            self._live = None
            raise
        self._live, self._exhausted = None, True

    def _fetch(self, live: Iterator[object], batch: int) -> object:
        """Return the next batch, read with the streams seeded by its number, so that it is the same after a resume."""
        if self.seed is None or self._draws_nothing:
            return next(live, _END)
        apart = (self.rank,) if order_is_of_rank(self.loader) else ()
        streams = HOST_STREAMS.save()
        try:
            seed = derive_seed(self.seed, "batch", self.split, self.epoch, batch, *apart)
            self._generators().seed_unseen(seed)
            seed_host_streams(seed)
            return next(live, _END)
        finally:
            HOST_STREAMS.put_back(streams)

    @property
    def _draws_nothing(self) -> bool:
        """Whether nothing is drawn in this process: by a list of batches, or where workers read."""
        return type(self.loader) in (list, tuple, range) or bool(getattr(self.loader, "num_workers", 0))

    @abstractmethod
    def _begin(self) -> Iterator[object]:
        """Return an iterator at the position, with `_fetched` equal to `consumed`."""

    def commit(self, batches: int) -> None:
        """Move the position by so many batches."""
        self.consumed += batches

    def _generators(self) -> Generators:
        if self._own.changed():
            self._own.look_again()
        return self._own

    def _put_back_generators(self) -> None:
        """Put the loader's generators back to how the pass found them, or note how it does."""
        if self._found is not None:
            self._generators().set_states(self._found)
        self._found = self._generators().states()

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        if epoch != self.epoch:
            self._found = None
        self.epoch = epoch
        self.consumed = self._fetched = 0
        self._live, self._exhausted = None, False

    def close(self) -> None:
        """End the loader's worker processes and forget the pass under way."""
        self._live = None
        super().close()

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        if self.seed is None:
            yield
            return
        apart = (self.rank,) if order_is_of_rank(self.loader) else ()
        seed = derive_seed(self.seed, "pass", self.split, self.epoch, *apart)
        with preserved_random_state(seed=seed):
            if self._generators().seeders:
                self._generators().seed_unseen(seed)
                seed_host_streams(seed)
            yield

    def _iterate(self) -> Iterator[object]:
        with kept_from_group_signals(self.loader):
            iterator: Iterator[Any] = iter(self.loader)
        if getattr(self.loader, "num_workers", 0) and hasattr(iterator, "_shutdown_workers"):
            end_with_process(iterator)
        return iterator

    def _first(self, iterator: Iterator[object], *, again: bool = False) -> Iterator[Any]:
        """Fetch the first batch of a pass, since many samplers draw their order only then.

        Args:
            iterator: The loader's iterator.
            again: It may be that of a finished pass, after which the next one begins.
        """
        first = next(iterator, _END)
        if first is _END and again:
            return self._first(self._iterate())
        return iterator if first is _END else chain([first], iterator)

    def _generator_state(self) -> dict[str, object]:
        current = self._generators().states()
        return {"generators": current, "generators_found": current if self._found is None else self._found}

    def _common_state(self) -> dict[str, object]:
        state = {"epoch": self.epoch, "consumed": self.consumed, "exhausted": self._exhausted}
        return {**state, "seed": self.seed, "world_size": self.world_size}

    def _load_common(self, state: Mapping[str, Any]) -> None:
        self.check_world_size(state)
        self.set_epoch(state["epoch"])
        self.consumed = state["consumed"]
        self._exhausted = state["exhausted"]
        self.seed = state["seed"]


class CountedCursor(LiveCursor):
    """Position in a loader without a state: after a resume what was consumed is read again, and dropped.

    Reading again from the same seeds gives the same order, and the same random numbers in new workers.
    """

    kind = "counted"

    def __init__(self, loader: object, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(loader, split=split, rank=rank, world_size=world_size, seed=seed)
        self._started = False
        self._passes: dict[str, int] | None = None
        """Counters of passes that parts of the loader have, as the pass found them."""
        self._expected: int | None = None
        self._last: int | None = None
        """Fingerprint of the batches that were read of the pass, up to the last one."""

    def _fetch(self, live: Iterator[object], batch: int) -> object:
        data = super()._fetch(live, batch)
        if data is not _END and type(self.loader) not in (list, tuple, range):
            self._last = fingerprint(data, self._last)
        return data

    def _begin(self) -> Iterator[object]:
        call_set_epoch(self.loader, self.epoch)
        self._check_can_begin()
        if getattr(self.loader, "persistent_workers", False):
            shut_down_workers(self.loader)  # their streams would depend on what they read in earlier passes
        self._put_back_generators()
        self._put_back_counters()
        self._last = None
        with self._seeded():
            equalize_draws(self.loader)
            iterator = self._first(self._iterate())
            for read in range(self.consumed):
                if self._fetch(iterator, read) is _END:
                    raise ValueError(
                        f"Expected the loader of split {self.split!r} to have at least {self.consumed} batches, which "
                        f"were consumed when the run was saved. Received: {read} batches. Restore its dataset and "
                        "batch size, or exclude 'dataloaders' from loading."
                    )
        self._fetched = self.consumed
        expected, self._expected = self._expected, None
        if self.consumed and expected is not None and expected != self._last and self.rank == 0:
            say_order_differs(self.split, self.loader, self.consumed)
        return iterator

    def _put_back_counters(self) -> None:
        counting = {path: vars(holder) for path, holder in self._generators().holders if counts_passes(holder)}
        if self._passes is None:
            self._passes = {path: held["epoch"] for path, held in counting.items()}
        for path, held in counting.items():
            held["epoch"] = self._passes.get(path, held["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass."""
        self._passes = None  # a counter goes on from one evaluation to the next, though these are passes of one number
        super().set_epoch(epoch)

    def _check_can_begin(self) -> None:
        once = isinstance(self.loader, Iterator)
        if once and self._started:
            raise ValueError(
                f"Expected a loader of split {self.split!r} that can be iterated again for another pass. Received: "
                f"{type(self.loader).__name__}, which ends for good. Pass an iterable with __iter__, such as a "
                "DataLoader."
            )
        self._started = True

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches consumed, and the loader's generators as the pass found them and as they are."""
        read = self._fetched == self.consumed and self._last is not None
        last = {"last": self._last} if read and self.consumed else {}
        passes = {"passes": dict(self._passes)} if self._passes else {}
        return {**self._common_state(), **self._generator_state(), **last, **passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position; says once that what was consumed will be read again."""
        self._load_common(state)
        self._generators().set_states(state["generators"])
        self._found = dict(state["generators_found"])
        self._expected = state.get("last")
        self._passes = dict(state["passes"]) if "passes" in state else None
        if self.consumed and not self._exhausted and self.rank == 0:
            logger.warning(
                "The loader of split %r (%s) cannot be positioned: its first %d batches of epoch %d are read again and "
                "dropped. Let the library build it from a dataset, or give it state_dict and load_state_dict.",
                self.split,
                type(self.loader).__name__,
                self.consumed,
                self.epoch,
            )


class _Ahead(NamedTuple):
    """A batch that was read only to learn whether there is one."""

    batch: Any
    """The batch, `_END`, or the `_Failed` reading of it."""
    state: dict[str, Any]
    """The position before it, or after the end."""


class _Failed(NamedTuple):
    error: Exception


class StatefulCursor(LiveCursor):
    """Position in a loader with a state of its own, such as a user's `StatefulDataLoader`.

    It comes back as exactly as that state is: torchdata's leaves out the random streams of its workers.

    A dataset that keeps its place cannot tell, from a state in which nothing is left, a pass of which only the end has not been seen
    from one that has not begun: it would begin another one. So where the length of a pass is not known, `state_dict` reads
    one batch ahead, which is the next one to be trained on, and says of a pass that is over that it is.
    """

    kind = "stateful"

    def __init__(self, loader: Any, *, split: str, rank: int, world_size: int, seed: int | None) -> None:
        super().__init__(loader, split=split, rank=rank, world_size=world_size, seed=seed)
        self._touched = False
        self._pending: Mapping[str, Any] | None = None
        self._ahead: _Ahead | None = None

    def _fetch(self, live: Iterator[object], batch: int) -> object:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return super()._fetch(live, batch)
        if isinstance(ahead.batch, _Failed):
            raise ahead.batch.error
        return ahead.batch

    def _begin(self) -> Iterator[object]:
        if self._live is not None:
            return self._skip_lost()
        if self.consumed and self._pending is None:
            raise RuntimeError(
                f"Expected the loader of split {self.split!r} to go on after batch {self.consumed} of the pass. "
                f"Received: {type(self.loader).__name__}, which was closed or raised an error. Resume from a "
                "checkpoint, or rewind."
            )
        call_set_epoch(self.loader, self.epoch)
        if self._pending is None and not isinstance(self.loader, StreamLoader):
            self._put_back_generators()
        loaded = self._load_pending()
        with self._seeded():
            equalize_draws(self.loader)
            iterator = self._iterate()
            self._touched, self._fetched = True, self.consumed
            return iterator if self.consumed else self._first(iterator, again=loaded)

    def _load_pending(self) -> bool:
        """Put the loader into the state that was loaded; return whether there was one."""
        if self._pending is None:
            return False
        pending, self._pending = self._pending, None
        if pending["loader"] is not None:
            if not isinstance(self.loader, StreamLoader):
                self._generators().set_states(pending["generators_found"])
            with self._seeded():
                self.loader.load_state_dict(pending["loader"])
                if isinstance(self.loader, StatefulDataLoader):
                    # Makes it restore now, since restoring draws from its generators, whose states follow.
                    self.loader.state_dict()
        if not isinstance(self.loader, StreamLoader):
            self._generators().set_states(pending["generators"])
        return pending["loader"] is not None

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of a pass; a state that was loaded from the middle of the very same one is given up."""
        if epoch == self.epoch and self.consumed and not isinstance(self.loader, StreamLoader):
            self._pending = None
        self._ahead = None
        super().set_epoch(epoch)

    def _carried(self) -> dict[str, object]:
        if isinstance(self.loader, StreamLoader):
            return {"generators": self.loader.carried(), "generators_found": {}}
        return self._generator_state()

    def _skip_lost(self) -> Iterator[object]:
        assert self._live is not None
        logger.warning(
            "%d batches of split %r were read and not used, and its loader cannot go back: they are skipped.",
            self._fetched - self.consumed,
            self.split,
        )
        self.consumed = self._fetched
        return self._live

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's own state; take it between updates, when nothing is fetched that is not consumed."""
        if self._ahead is None and self._live is not None and self._may_be_over():
            self._ahead = self._look_ahead(self._live)
        return self._place() if self._ahead is None else self._ahead.state

    def _may_be_over(self) -> bool:
        if isinstance(self.loader, StreamLoader) and self.loader.is_read_again:
            return False
        return self._fetched == self.consumed > 0 and self.remaining_batches() in (None, 0)

    def _look_ahead(self, live: Iterator[object]) -> _Ahead:
        before = copy.deepcopy(self._place())  # a dataset may go on changing what its state holds
        try:
            batch = super()._fetch(live, self._fetched)
        except Exception as error:  # it concerns whoever asks for that batch, not who saves
            batch = _Failed(error)
        return _Ahead(batch, {**self._place(), "exhausted": True} if batch is _END else before)

    def _place(self) -> dict[str, object]:
        if self._pending is not None:
            own = self._pending["loader"]
            generators = {name: self._pending[name] for name in ("generators", "generators_found")}
        else:
            own = self.loader.state_dict() if self._touched else None
            generators = self._carried()
        workers = getattr(self.loader, "num_workers", None)
        return {**self._common_state(), "workers": workers, "loader": own, **generators}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position.

        Raises:
            ValueError: If a `StatefulDataLoader` had another number of workers: its state holds one part for each.
        """
        workers = getattr(self.loader, "num_workers", None)
        if isinstance(self.loader, StatefulDataLoader) and state["loader"] is not None and state["workers"] != workers:
            raise ValueError(
                f"Expected num_workers={state['workers']} for the loader of split {self.split!r}, as when its state "
                f"was saved: a StatefulDataLoader keeps a part of it in each worker. Received: num_workers={workers}. "
                "Restore the number, or let the library build the loader from a map-style dataset."
            )
        self._load_common(state)
        found = state.get("generators_found", state["generators"])
        self._pending = {"loader": state["loader"], "generators": state["generators"], "generators_found": found}
        if isinstance(self.loader, StreamLoader):
            self.loader.seed = int(state["seed"])
            self.loader.carry(state["generators"])
            return
        self._found = dict(found)
        if state["loader"] is None:
            self._generators().set_states(state["generators"])
