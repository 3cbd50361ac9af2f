"""Where a batch comes from: the batches of a split and the position in them, for every kind of loader."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from .comparison import describe
from .dataset_state import (
    changed_attributes,
    get_states,
    is_stateful,
    plain_attributes,
    set_states,
    stateful_parts,
)
from .keyed import draws_nothing
from .live import LiveLoader
from .loader import KeyedLoader, StreamLoader
from .sampled import as_keyed_loader, of_torchdata, order_of
from .sampler import Batch, Share

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.training.session import TrainingSession

logger = logging.getLogger("danling")

_SAMPLERS = 8
"""How many samplers within samplers are looked at."""
_NAMED = 5
"""How many changed attributes a message names."""


def open_source(
    loader: Any,
    *,
    split: str,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    reads: bool = True,
    own_state: bool = False,
) -> BatchSource:
    """Return the batches of a loader and the position in them. The loader decides how it is positioned (`kind`):

    - `"position"`, a loader of the library: three integers, valid for any number of workers and ranks, and nothing is read twice;
    - `"sampled"`, a loader over a map-style dataset in the order of a sampler: what the sampler was like when it began the pass, and how
      far it got; one state per rank. A loader of torch or torchdata that a user made is read by one of this kind, in the order of its
      sampler;
    - `"window"`, an `UpdateLoader`, such as that of a stream: samples consumed of the one order that all ranks share;
    - `"stateful"`, a loader with `state_dict` and `load_state_dict`: its own state; one per rank;
    - `"counted"`, any other iterable: the number of batches consumed, which are read again and dropped when the run is resumed.

    Args:
        loader: An iterable of batches. It is never changed.
        split: Its split.
        rank: Which share of the split this rank reads: its coordinate in the data domain.
        world_size: How many shares there are.
        seed: Base seed of the run, from which the order of a user's loader is seeded at each pass.
        reads: Whether this rank reads batches; else it gets placeholders, and its position follows those that read. The end of a user's
            loader is known only to these, so that it never ends by itself here: the ranks have to agree on the end.
        own_state: Whether a `StatefulDataLoader` is read itself, and its own state is saved.

    Raises:
        ValueError: If the loader cannot be iterated, its sampler takes another share, or it is none that `own_state` is for.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ValueError(
            f"Expected the loader of split {split!r} to be iterable. Received: loader={loader!r} ({type(loader).__name__}). Pass a "
            "DataLoader, or put a dataset into `datasets`."
        )
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise ValueError(
            f"Expected a loader of batches in self.dataloaders[{split!r}]. Received: a {type(loader).__name__}, a dataset, of which each "
            f"single sample would be a batch. Write self.datasets[{split!r}] = ..., and the loader is made of it; a dataset whose items "
            "are batches goes into DataLoader(dataset, batch_size=None)."
        )
    read = loader
    share = Share(split, seed, rank, world_size)
    if not isinstance(loader, (KeyedLoader, UpdateLoader)):
        if reads:
            _check_share(loader, share)
        in_order = getattr(loader, "in_order", True) or not getattr(loader, "num_workers", 0)
        if not in_order and rank == 0:
            logger.warning(
                "The loader of split %r has in_order=False: batches come as workers finish, and a resumed run trains on them in another "
                "order. Leave it out.",
                split,
            )
        if own_state:
            _check_own_state(loader, share)
        else:
            read = as_keyed_loader(loader, share)
        if not isinstance(read, KeyedLoader):
            read = LiveLoader(read, share)
    return BatchSource(loader, read, share, reads=reads)


def _check_own_state(loader: Any, share: Share) -> None:
    """Refuse `dataloader.own_state` for what is no `StatefulDataLoader`, and say what its state lacks."""
    if not isinstance(loader, of_torchdata("StatefulDataLoader")):
        raise ValueError(
            f"Expected a StatefulDataLoader of torchdata for split {share.split!r} with dataloader.own_state=true. Received: a "
            f"{type(loader).__name__}. Leave it out, or set dataloader.<split>.own_state for the splits that have one."
        )
    if loader.num_workers and share.rank == 0 and not draws_nothing(loader.dataset):
        logger.warning(
            "The loader of split %r is read with its own state, which has no random numbers of its %d workers: what they draw for a sample "
            "differs after a resume. Leave dataloader.own_state out, set num_workers=0, or set draws_random = False on the dataset.",
            share.split,
            loader.num_workers,
        )


def _check_share(loader: object, share: Share) -> None:
    """Refuse a sampler that divides a user's loader over other ranks than those that read different data."""
    sampler = order_of(loader)
    # Objects that pass attributes on may be their own sampler, or make another one at each question.
    for _ in range(_SAMPLERS):
        if isinstance(sampler, DistributedSampler) or getattr(sampler, "sampler", None) is None:
            break
        sampler = sampler.sampler
    number, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    is_divided = isinstance(number, int) and isinstance(rank, int) and number > 1
    if is_divided and (rank, number) != (share.rank, share.world_size):
        raise ValueError(
            f"Expected the sampler of split {share.split!r} to take share {share.rank} of {share.world_size}, as this rank reads data. "
            f"Received: {type(sampler).__name__} with rank={rank}, num_replicas={number}. Pass rank=self.data_domain.rank and "
            "num_replicas=self.data_domain.size, or let the library build the loader from a dataset."
        )


class BatchSource:
    """Batches of a loader, and the position up to which they are consumed; see `open_source`.

    Prefetched batches do not count: the position moves when `commit` is called.

    Attributes:
        loader: What `open_source` was given.
        read: What reads it: the loader itself, a keyed one that replaces it, or a `LiveLoader` around it.
        position: What has the position: the order of a keyed loader, else the same.
        split: Name of the split.
        world_size: How many ranks read different shares of it.
        reads: Whether batches are read on this rank.
        kind: How the loader is positioned.
        is_rank_local: Whether each rank has its own state to save.
        length_is_known: Whether a rank that reads nothing knows the batches, and the end of a pass, as those do that read.
        is_built: Whether the library has built the loader, of a dataset that must not change within a pass.
    """

    def __init__(self, loader: Any, read: Any, share: Share, *, reads: bool) -> None:
        self.loader: Any = loader
        self.read: Any = read
        self.position: Any = read.order if isinstance(read, KeyedLoader) else read
        self.split, self.world_size, self.reads = share.split, share.world_size, reads
        self.kind: str = read.kind
        self.is_rank_local: bool = read.is_rank_local
        self.length_is_known: bool = read.length_is_known
        self.is_built = isinstance(loader, (KeyedLoader, StreamLoader))
        self.restored: Mapping[str, Any] | None = None
        """The state that was loaded, until a batch is read after it."""
        self.misfit: ValueError | None = None
        """Why that state does not fit the dataset that is there now."""
        self.is_of_hook = False
        """Whether `on_pass_start` has put the dataset into `self.datasets`."""
        self._noted: tuple[int, dict[str, object]] | None = None
        """The pass of which the small attributes of the dataset were noted, and these."""

    def note_dataset(self) -> None:
        """Note the small attributes of the dataset, once a pass; call before anything of the pass is read or set."""
        if self._noted is None or self._noted[0] != self.epoch:
            self._noted = self.epoch, plain_attributes(getattr(self.loader, "dataset", None))

    def unsaved_changes(self) -> list[str]:
        """Return a sentence for each kind of change of the dataset since its pass began that a resumed run would not have.

        Call after `state_dict`. May be called on one rank.
        """
        dataset = getattr(self.loader, "dataset", None)
        workers = getattr(self.loader, "num_workers", 0)
        who = f"The dataset of split {self.split!r} ({type(dataset).__name__})"
        found = []
        is_keyed = isinstance(self.read, KeyedLoader)
        # What is read again from the beginning of the pass makes again what reading changes.
        if self._noted is not None and (is_keyed or workers):
            names = (
                changed_attributes(self._noted[1], plain_attributes(dataset))
                - self.read.set_by_epoch
            )
            if names:
                listing = ", ".join(name.removeprefix(".") for name in sorted(names)[:_NAMED])
                found.append(
                    f"{who} has changed since its pass began: {listing}. It has no state_dict, so no checkpoint has these values, and a "
                    "resumed run begins without them. Give it state_dict and load_state_dict, set them in train_epoch from the epoch, or "
                    "return {} from state_dict if they do not matter."
                )
        if self.is_of_hook and self.consumed and self.remaining_batches() != 0:
            found.append(
                f"{who} was put into self.datasets by on_pass_start, which is not called for the rest of a pass after a resume: that "
                "reads the dataset that __init__ makes. Replace it in train_epoch, before super().train_epoch(split), from what is saved, "
                "such as the epoch or an attribute."
            )
        if is_keyed and self.read.is_ahead:
            found.append(
                f"{who} has changed its state within a pass, and its {workers} workers read copies from the beginning of the pass: a run "
                "that is resumed here reads other samples. Change it between passes, or set num_workers=0."
            )
        return found

    @property
    def epoch(self) -> int:
        """The pass that the position is in, from 0."""
        return int(self.position.epoch if self.misfit is None else self._awaited["epoch"])

    @property
    def _awaited(self) -> Mapping[str, Any]:
        """The state that waits for its dataset."""
        assert self.restored is not None
        return self.restored

    @property
    def consumed(self) -> int:
        """How much of the pass is consumed: samples over all ranks for a loader of the library, else batches of this rank."""
        return int(self.position.consumed if self.misfit is None else self._awaited["consumed"])

    @property
    def even(self) -> bool:
        """Whether every rank is known to get the same number of batches."""
        return (self.reads or self.length_is_known) and bool(self.position.is_even())

    def remaining_batches(self) -> int | None:
        """Return the batches from the position to the end of the pass on this rank, `None` if unknown."""
        left: int | None = self.position.remaining_batches() if self.misfit is None else None
        return left

    def batches(self) -> Iterator[Batch]:
        """Return an iterator over the rest of the pass, from the position on.

        Calls `set_epoch` of the loader, its samplers and its dataset first. Workers prefetch batches; without workers, a batch is fetched
        only when the caller asks for it. A rank that reads nothing gets placeholders, without end where that is not known here.
        """
        if self.misfit is not None:
            raise self.misfit
        self.restored = None
        batches: Iterator[Batch] = self.read.micro_batches(read=self.reads)
        return batches

    def commit(self, batches: Sequence[Batch]) -> None:
        """Move the position: an update, committed or skipped, consumed these batches.

        Args:
            batches: The next batches that `batches()` gave, padding included. Only their number is read.
        """
        self.position.advance(len(batches))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of pass `epoch`."""
        self.restored = self.misfit = None
        self.position.set_epoch(epoch)

    def tell_epoch(self) -> None:
        """Call `set_epoch` of the dataset, from which its length may follow. Reading calls it too."""
        if isinstance(self.read, KeyedLoader):
            self.read.tell_epoch()

    def finish_pass(self) -> None:
        """Go to the beginning of the next pass."""
        self.set_epoch(self.epoch + 1)

    def rewind(self) -> None:
        """Go to the beginning of this pass."""
        self.set_epoch(self.epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position, as tensors and plain values. Take it between updates."""
        if self.misfit is not None:
            # The position still waits for its dataset: it is saved as it was restored.
            return dict(self._awaited)
        return {"kind": self.kind, **self.read.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Args:
            state: What `state_dict` returned; of this rank, where `is_rank_local`.

        Raises:
            ValueError: If it was saved by another kind of loader, or does not fit this one.
        """
        self.restored = state
        self.misfit = None
        if not (self.reads or self.length_is_known):
            # The state of the loader itself is for the ranks that read it.
            self.set_epoch(int(state["epoch"]))
            self.position.advance(int(state["consumed"]))
            return
        kind = state.get("kind")
        if kind != self.kind:
            raise ValueError(
                f"Expected a state of kind {self.kind!r} for split {self.split!r}, whose loader is a {type(self.loader).__name__}. "
                f"Received: kind={kind!r}, saved by another kind of loader. Restore the loader, or exclude 'dataloaders' from loading to "
                "restart the epoch."
            )
        is_redivided = state.get("world_size", self.world_size) != self.world_size
        # At the beginning of a pass nothing was read that would have to be divided anew.
        if self.is_rank_local and is_redivided and state.get("consumed"):
            raise ValueError(
                f"Expected {state['world_size']} data ranks: the loader of split {self.split!r} ({type(self.loader).__name__}) counts what "
                f"each rank has read of this epoch, which cannot be redivided. Received: {self.world_size}. Let the library build the "
                "loader from a dataset, or exclude 'dataloaders' from loading."
            )
        self.read.load_state_dict({key: value for key, value in state.items() if key != "kind"})

    def await_dataset(self, state: Mapping[str, Any], misfit: ValueError) -> None:
        """Take a position within a pass that the dataset does not fit: it may be replaced before the pass continues.

        Args:
            state: The position.
            misfit: Why it does not fit; raised when the pass continues with this dataset.
        """
        self.restored, self.misfit = state, misfit

    def close(self) -> None:
        """End the loader's worker processes."""
        self.read.close()

    @property
    def can_restart(self) -> bool:
        """Whether a pass can be begun, left and begun anew with the same batches.

        An iterator, and a loader over one, give each batch once; and a loader with its own state that torch does not know keeps its
        place.
        """
        if self.kind == "stateful" and not isinstance(self.loader, TorchDataLoader):
            return False
        dataset = getattr(self.loader, "dataset", None)
        return not (hasattr(self.loader, "__next__") or hasattr(dataset, "__next__"))

    @contextmanager
    def peek(self) -> Iterator[None]:
        """Put the states that the dataset and the samplers of the loader declare by `state_dict` back on exit, also after an error."""
        parts = stateful_parts(getattr(self.loader, "dataset", None))
        order = self.loader.order if isinstance(self.loader, KeyedLoader) else self.loader
        samplers = {name: getattr(order, name, None) for name in ("sampler", "batch_sampler")}
        parts |= {name: held for name, held in samplers.items() if is_stateful(held)}
        states = get_states(parts)
        try:
            yield
        finally:
            set_states(parts, states)

    def described(self, batch: Batch) -> object:
        """Return a fingerprint by which ranks that read identical data are found: that of the dataset's values, else of the batch.

        Args:
            batch: The first one of a pass.
        """
        loader = self.loader
        ordered = loader.order if isinstance(loader, KeyedLoader) else loader
        order = order_of(ordered)
        # With these samplers each rank reads the whole dataset, in another order: batches differ where the data does not.
        reads_all = isinstance(loader, TorchDataLoader) and type(order) in (
            RandomSampler,
            SequentialSampler,
        )
        read = loader.dataset if reads_all else batch.data
        return describe(read)


# Loaders of one order of samples that grows while it is read


class LoaderContext(NamedTuple):
    """Where an `UpdateLoader` is read.

    Attributes:
        share: Its split, and which share of each update this rank reads.
        accum_steps: Micro-batches of an update on each rank.
        is_main: Whether this process acts for all of them where one has to, such as in freeing what was read.
        trained: Whether the split is trained on; else it is evaluated.
        session: That of the run, where a run reads it.
    """

    share: Share = Share()
    accum_steps: int = 1
    is_main: bool = True
    trained: bool = True
    session: TrainingSession | None = None


class UpdateLoader(ABC):
    """A loader that divides whole updates over the ranks itself, so that all of them end a pass at the same one without a word.

    Its position counts samples over all ranks, and means the same on any number of them. In addition to the methods here, it has
    `micro_batches`, `advance`, `set_epoch`, `load_state_dict` and `close`, as `LiveLoader` has them.

    Attributes:
        epoch: Pass of the position, from 0.
        consumed: Samples of the pass that are consumed.
    """

    kind = "window"  # as in the states of earlier checkpoints
    is_rank_local = False
    length_is_known = True
    set_by_epoch: frozenset[str] = frozenset()
    epoch: int
    consumed: int

    def is_even(self) -> bool:
        """Return whether every rank is known to get the same number of batches."""
        return True

    def remaining_batches(self) -> int | None:
        """Return the batches from the position to the end of the pass: not known."""
        return None

    @abstractmethod
    def bind_context(self, context: LoaderContext, runner: BaseRunner | None = None) -> None:
        """Take where the loader is read, and by which run. Called before all else."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    @abstractmethod
    def commit_state(self, state: Mapping[str, object]) -> None:
        """Free the data before a position that is in a checkpoint on the disk. May be called on one rank, and from another thread."""

    @abstractmethod
    def free(self) -> None:
        """Free the data that `commit_state` left to be freed; called in the thread that reads."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Return the figures of the loader that are logged with the metrics of an update. May be called on one rank."""

    @abstractmethod
    def standing(self) -> Mapping[str, object]:
        """Return how far the loader and those who fill it are, as plain values: `stream`, a name that both sides know, `side`,
        `published`, `trained`, `waited_seconds` and `end`. May be called on one rank."""
