"""The ranks of a run: with which others a rank reduces, what of its work counts, and how ranks meet without a collective."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_PAUSE_SECONDS = 0.02


def _sendable(error: Exception | None) -> Exception | None:
    """Return an error that another process can read: itself, or, where it cannot be pickled, a `RuntimeError` with its text."""
    try:
        # Some errors can be pickled and not read again: their `__init__` takes other arguments.
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _as_it_is(error: Exception) -> Exception:
    return error


class MembershipChanged(BaseException):
    """The ranks of the run have changed: what was begun since the last boundary is begun again.

    As `KeyboardInterrupt`, it is no `Exception`: nothing between a collective and the loop may catch it. Only an extension raises it.
    """


class Domain:
    """The ranks of one process group, or this process alone.

    Attributes:
        rank: Coordinate of this process among the members.
        size: Number of members. At 1 no method communicates.

    Args:
        group: A process group; `None` is the default group where one is initialised.
        device: Device on which collectives run; tensors elsewhere are copied there and back.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, device: torch.device | None = None
    ) -> None:
        self.group = group
        # As it is now: a group that is joined later does not change the members.
        distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank(group) if distributed else 0
        self.size: int = dist.get_world_size(group) if distributed else 1
        self.device = device or torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over the members and return it. Call on all members.

        Args:
            tensor: Any shape and a dtype that the backend reduces.
            op: `"sum"`, `"max"`, `"min"` or `"product"`.
        """
        if self.size == 1:
            return tensor
        moved = self._reachable(tensor)
        dist.all_reduce(moved, _OPERATIONS[op], group=self.group)
        return tensor if moved is tensor else tensor.copy_(moved)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy `tensor` from the member `source` into `tensor` on all members. Call on all members."""
        if self.size == 1:
            return tensor
        moved = self._reachable(tensor)
        dist.broadcast(moved, group_src=source, group=self.group)
        return tensor if moved is tensor else tensor.copy_(moved)

    def _reachable(self, tensor: Tensor) -> Tensor:
        """Return `tensor` where the group's backend moves tensors of its device and kind, else a copy on the device of collectives."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()  # a view whose memory has other values
        tensor = (
            tensor.contiguous()
        )  # gloo would move as many elements that follow each other in memory
        kind = tensor.device.type
        if kind == self.device.type or f"{kind}:" in dist.get_backend_config(self.group):
            return tensor
        return tensor.to(self.device)

    def gather_objects(self, value: T) -> list[T]:
        """Return the values of all members in rank order, on all of them. Call on all members."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast_object(self, value: T, source: int = 0) -> T:
        """Return the value of the member `source` on all members. Call on all members."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=source, group=self.group)
        return box[0]

    def on_first(
        self, action: Callable[[], T], *, raised_as: Callable[[Exception], Exception] = _as_it_is
    ) -> T:
        """Run `action` on the first member; return its value, or raise its error, on all of them. Call on all members.

        Args:
            action: What to run. Its value must be one that can be pickled.
            raised_as: Returns the error to raise in the place of one of `action`.
        """
        value: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                found = action()
                # Here, and not in the broadcast: what cannot be pickled is an error of `action` then, and the others do not wait for it.
                value = pickle.dumps(found) if self.size > 1 else found
            except Exception as raised:
                error = raised_as(raised)
        if self.size > 1:
            value, sent = self.broadcast_object((value, _sendable(error)))
            # The first member raises the error itself, which has its traceback.
            error = error or sent
        if error is not None:
            raise error
        result: T = pickle.loads(value) if self.size > 1 else value
        return result

    def on_all(
        self, action: Callable[[], T], *, raised_as: Callable[[Exception], Exception] = _as_it_is
    ) -> T:
        """Run `action` on every member; return its value here, or raise the error of any member on all of them. Call on all members.

        Args:
            action: What to run.
            raised_as: Returns the error to raise in the place of one of `action`.
        """
        with self.failing_together(raised_as=raised_as):
            value = action()
        return value

    @contextmanager
    def failing_together(
        self, *, raised_as: Callable[[Exception], Exception] = _as_it_is
    ) -> Iterator[None]:
        """Raise the error of any member inside on all of them, where the context ends. Enter on all members.

        Args:
            raised_as: Returns the error to raise in the place of one inside.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised_as(raised)
        self.raise_any(error)

    def raise_any(self, error: Exception | None) -> None:
        """Raise the error of the first member that has one, on all of them. Call on all members."""
        told = self.gather_objects(_sendable(error)) if self.size > 1 else [error]
        found = next((rank for rank, each in enumerate(told) if each is not None), None)
        if found is None:
            return
        first = told[found]
        if error is not None and found == self.rank:
            raise error  # it has its traceback
        assert first is not None
        raise first from error

    def barrier(self) -> None:
        """Wait until all members have come here. Call on all members."""
        if self.size > 1:
            dist.barrier(group=self.group)


class LocalDomain(Domain):
    """This process alone: nothing is communicated, whatever groups exist."""

    def __init__(self) -> None:
        self.group = None
        self.rank = 0
        self.size = 1
        self.device = torch.device("cpu")


def world_of(size: int, device: torch.device) -> Domain:
    """Return the domain of all processes of a run. Call on all ranks.

    Args:
        size: Number of processes that were launched together.
        device: Device on which collectives run.

    Raises:
        ValueError: If there are several, and no process group joins them.
    """
    if size > 1 and not dist.is_initialized():
        raise ValueError(
            f"Expected `init_distributed` to join a process group of {size} processes. Received: none. Call super().init_distributed() "
            "in it, or torch.distributed.init_process_group."
        )
    return Domain(device=device) if size > 1 else LocalDomain()


def _default_group() -> Sequence[Any]:
    """Return the default process group alone."""
    return (None,)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The place of one rank in a run.

    Attributes:
        data: Ranks that read different samples.
        optimizer: Ranks that decide an update together.
        metrics: Ranks whose losses and metrics add up to those of all data.
        groups: Returns the process groups that training communicates over; `None` is the default one.
        reads_data: Whether this rank reads batches.
        counts_loss: Whether the loss of this rank counts: of the ranks that compute the same one, the first does.
        counts_samples: Whether the samples of this rank count: of the ranks that see the same ones, the first does.
        forward_place: Joins the keys of random numbers in a forward, if ranks that see the same samples need different noise.
        update_place: Joins the keys of random numbers in an optimizer step, where no rank with another one holds a copy of a parameter.
        replica_group: Index of the replica group of this process, and how many there are.
    """

    data: Domain
    optimizer: Domain
    metrics: Domain
    groups: Callable[[], Sequence[Any]] = _default_group
    reads_data: bool = True
    counts_loss: bool = True
    counts_samples: bool = True
    forward_place: tuple[int, ...] = ()
    update_place: tuple[int, ...] = ()
    replica_group: tuple[int, int] = (0, 1)

    @classmethod
    def alike(cls, world: Domain, **more: Any) -> Placement:
        """Return the place of a rank if every rank holds the whole model and reads its own samples."""
        return cls(data=world, optimizer=world, metrics=world, **more)

    @property
    def data_replicas(self) -> int:
        """Number of ranks that read different samples to train on, over all replica groups."""
        return self.data.size * self.replica_group[1]

    def share(self, *, trained: bool) -> tuple[int, int]:
        """Return which share of a split this rank reads, and how many shares there are.

        Training data is divided over all replica groups; each group evaluates all of a split, so that no death makes a metric wrong.

        Args:
            trained: Whether the split is trained on.
        """
        group, groups = self.replica_group if trained else (0, 1)
        return group * self.data.size + self.data.rank, groups * self.data.size


# Without a collective: a rank may be somewhere else


def default_store() -> Store:
    """Return the store that all ranks of the job share."""
    return _get_default_store()


def all_arrive(name: str, *, seconds: float) -> bool:
    """Return whether every rank of the job comes here within some seconds; each is told the same.

    A collective would hang, or pair with another one, where some ranks wait for each other elsewhere. May be called on some
    ranks only.

    Args:
        name: What the ranks come here for; used once.
        seconds: How long to wait for the others.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return True
    store = default_store()
    size = dist.get_world_size()
    end = time.monotonic() + seconds
    counter = f"danling/{name}/arrived"
    store.add(counter, 1)
    # Adding 0 reads the counter.
    while (arrived := store.add(counter, 0)) < size and time.monotonic() <= end:
        time.sleep(_PAUSE_SECONDS)
    # The first rank that has seen one or the other decides: the last one may arrive at the instant at which another gives it up.
    verdict = store.compare_set(
        f"danling/{name}/verdict", "", "together" if arrived == size else "apart"
    )
    return bytes(verdict) == b"together"
