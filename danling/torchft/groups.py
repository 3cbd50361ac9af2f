"""Replica groups that may come and go: quorum, commit, healing, and sums over those that take part, by TorchFT."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.utils._pytree import tree_map_only

from danling.config import RunnerConfig
from danling.distributed import Domain
from danling.training.session import IntactStateError, TrainingAbandoned
from danling.utils.tensors import bucketed, flattened, local_part, scatter

logger = logging.getLogger("danling")

_PAUSE = 0.1
_LONGEST_PAUSE = 1.0
"""Seconds before an update is tried again."""


_SLICE = 0.5
"""Seconds of waiting for a quorum between two looks at what this rank is asked."""

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse."""


class QuorumError(IntactStateError):
    """The replica groups could not agree on who takes part, or on any update."""


class ReplicaGroups:
    """What a process says to the processes of its rank in the other replica groups.

    An update is `open`, forward and backward, `all_reduce` and `reduce_gradients`, `commit`. Until `commit` returns True nothing may
    change. Errors of a collective are kept until then: they make this update fail, on all ranks of the group. Which groups take
    part is agreed anew, and before the forward begins, in each `open`: a healed group takes part at once with the weights of the
    others, and the state that is sent is not being changed.

    Construct, and call every method, on all ranks of the group. A subclass says what a group heals from.

    Attributes:
        failures: Updates in a row that were not committed.

    Raises:
        ImportError: If torchft is not installed.
        ValueError: If the environment does not name a lighthouse.
        QuorumError: If nothing answers at its address.
    """

    def __init__(self, config: RunnerConfig, group: Domain) -> None:
        try:
            import torchft  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"Expected torchft to be installed for ft.enabled. Received: {error}. Install it with `pip install torchft-nightly`."
            ) from error
        ft = self.settings = config.ft
        # The other groups may be evaluating or saving.
        self.timeout = ft.process_group_timeout_ms / 1000
        self.quorum_timeout = max(self.timeout, config.comm.train_timeout_seconds or 60.0)
        self.max_failures = config.max_skipped_updates
        self.failures = 0
        self._lighthouse = os.environ.get(LIGHTHOUSE, "")
        if not self._lighthouse:
            raise ValueError(
                f"Expected {LIGHTHOUSE} to hold the address of a lighthouse, such as http://127.0.0.1:29510. Received: nothing. Start one "
                f"with `torchft_lighthouse --min_replicas 1` and set {LIGHTHOUSE} for every replica group."
            )
        try:
            socket.create_connection(_host_and_port(self._lighthouse), timeout=self.timeout).close()
        except OSError as error:
            raise self._unreached(error) from error
        self._group = group
        self._healed = self._healing = False
        self._device = group.device if ft.process_group == "nccl" else torch.device("cpu")
        self._manager: Any = None
        self._process_group: Any = None
        self._store: TCPStore | None = None
        self._counts = {"step": 0, "batches_committed": 0}

    def sent_state(self) -> object:
        """Return what the same rank of another group heals from, without communication."""
        raise NotImplementedError

    def take_over(self, state: Any) -> None:
        """Take over what `sent_state` returned on the same rank of another group. Called on every rank of the group that heals."""
        raise NotImplementedError

    def asked_to_stop(self) -> bool:
        """Whether this rank is to end its wait for the other groups."""
        return False

    def _unreached(self, error: Exception) -> QuorumError:
        return QuorumError(
            f"Expected a lighthouse of TorchFT at {self._lighthouse}. Received: {error}. Start one with "
            f"`torchft_lighthouse --min_replicas 1`, and set {LIGHTHOUSE} to its address."
        )

    def _join(self) -> None:
        # Not before the first update: the lighthouse waits for a group that is there and does not ask, and so do the others.
        settings, group = self.settings, self._group
        timeout, patience = timedelta(seconds=self.timeout), timedelta(seconds=self.quorum_timeout)
        try:
            host = address_towards(self._lighthouse)
            # Its own store for every attempt: that of the launcher may still hold the addresses of an earlier one.
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if group.rank == 0 else None
            address, port = group.broadcast_object((host, self._store.port if self._store is not None else 0))
            self._process_group = _process_group(settings.process_group, timeout)
            self._manager = _manager(
                self,
                pg=self._process_group,
                load_state_dict=self._heal,
                state_dict=lambda: self.sent_state(),
                min_replica_size=settings.min_replica_size,
                # Before the forward: a healed group then takes part at once, and a state that is sent is not being changed.
                use_async_quorum=False,
                timeout=timeout,
                quorum_timeout=patience,
                connect_timeout=timeout,
                rank=group.rank,
                world_size=group.size,
                store_addr=address,
                store_port=port,
                lighthouse_addr=self._lighthouse,
                replica_id=f"replica-{settings.replica_id:06d}-ranks-{group.size}",
                hostname=host,
                checkpoint_transport=_transport(host, patience),
            )
        except Exception as error:
            raise self._unreached(error) from error
        self._manager.load_state_dict(dict(self._counts))

    def keeps_waiting(self, waits: bool) -> bool:
        """Return whether a rank of this group still waits for the quorum. Call on all ranks of the group."""
        stops = waits and self.asked_to_stop()
        votes = torch.tensor([float(waits), float(stops)], dtype=torch.float64)
        waiting, stopping = self._group.all_reduce(votes).tolist()
        if stopping:
            raise WaitAbandonedError
        return bool(waiting)

    # One update

    def open(self) -> bool:
        """Agree with the other groups on who takes part in the next update, and heal where this group is behind.

        Returns:
            Whether this rank was given the state of another group.
        """
        self._healed = False
        end = time.monotonic() + self.quorum_timeout
        while True:
            may_wait = time.monotonic() < end
            try:
                if self._manager is None:
                    self._join()
                self._manager.start_quorum()
                return self._healed
            except (WaitAbandonedError, ReplicaSizeError):
                self.leave()
                raise
            except OtherSizeMet as error:
                # It ends with its own error; without it this group would wait for ranks that are not there.
                self.leave()
                logger.warning("A replica group of another size has come, and is refused; trying again without it.")
                if self._group.size > 1:
                    may_wait = bool(self._group.all_reduce(torch.tensor([float(may_wait)]), "min").item())
                if not may_wait:
                    raise QuorumError(
                        "Expected replica groups of one size. Received: a group of another size that does not leave. Stop it, and "
                        "start it again with as many processes as the others have."
                    ) from error
            except Exception as error:
                if self._healing or isinstance(error, QuorumError):
                    raise
                asked = "the lighthouse" if self._group.rank == 0 else "rank 0 of this group, which asks the lighthouse"
                raise QuorumError(
                    f"Expected {asked} at {self._lighthouse}, to name the replica groups of the next update within "
                    f"{self.quorum_timeout:g} seconds. Received: {error}. See that the lighthouse runs and that "
                    "all ranks of this group do, and start what has ended again: it goes on from the last checkpoint."
                ) from error
            time.sleep(_LONGEST_PAUSE)

    def _heal(self, state: object) -> None:
        self._healing = True
        # The tensors are in the bytes that were received, which must not be written to.
        self.take_over(tree_map_only(Tensor, torch.clone, state))
        self._healing, self._healed = False, True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the groups that take part, in place, and return it; after an error it holds anything.

        Args:
            tensor: Contiguous, of any shape.
        """
        moved = tensor.to(self._device)
        self._manager.allreduce(moved, reduce_op=dist.ReduceOp.SUM).wait()
        return tensor if moved is tensor else tensor.copy_(moved)

    def reduce_gradients(
        self, parameters: Sequence[nn.Parameter], present: Sequence[bool], factor: float | Tensor = 1.0
    ) -> None:
        """Sum gradients, or the shards of them that this rank holds, over the groups that take part.

        Args:
            parameters: The same ones in every group.
            present: Which of them have a gradient in any group; where this one has none, it is zero.
            factor: What the gradients of this group are multiplied with first.
        """
        held = [parameter for parameter, there in zip(parameters, present, strict=True) if there]
        for parameter in held:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local_part(parameter.grad) for parameter in held if parameter.grad is not None]
        for bucket in bucketed(gradients):
            flat = flattened(bucket)
            if not (isinstance(factor, float) and factor == 1.0):
                flat.mul_(factor)
            scatter(self.all_reduce(flat), bucket)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the groups that take part."""
        for bucket in bucketed(tensors):
            scatter(self.all_reduce(flattened(bucket)).div_(self.num_participants), bucket)

    def sum_totals(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """Add sums and weights by name over the groups that took part in the last update. Between two updates.

        Returns:
            The sums; those of this group where a group has gone meanwhile, or they have other names.
        """
        names = sorted(totals)
        mine = [1.0, float(len(names)), float(crc32("\0".join(names).encode()))]
        groups, *shared = self.all_reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        if not names or self._manager.errored() or shared != [groups * figure for figure in mine[1:]]:
            return dict(totals)
        figures = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        self.all_reduce(figures)
        if self._manager.errored():
            return dict(totals)
        return {name: (total, weight) for name, (total, weight) in zip(names, figures.tolist())}

    def commit(self) -> bool:
        """Whether the update may be made: no rank of this group met an error, and enough groups took part."""
        if self._manager.should_commit():
            self.failures = 0
            return True
        self.failures += 1
        limit = self.max_failures
        if limit is not None and self.failures > limit:
            error = self._manager.errored()
            reason = f"{self.num_participants} replica groups of {self.settings.min_replica_size}"
            last = error.original_exception if error is not None else reason
            raise QuorumError(
                f"Expected an update to be committed after at most {limit} attempts. Received: {self.failures} failures in a row, the "
                f"last one: {last}. Look at the network between the replica groups, raise "
                "ft.process_group_timeout_ms, or lower ft.min_replica_size."
            )
        # The next attempt is of no use before the lighthouse has noticed a death, or a group has come.
        time.sleep(min(_PAUSE * self.failures, _LONGEST_PAUSE))
        return False

    # Membership

    @property
    def num_participants(self) -> int:
        """Groups that take part in the open update, or took part in the last one; 0 before the first."""
        return int(self._manager.num_participants()) if self._manager is not None else 0

    def state_dict(self) -> dict[str, int]:
        """Return how many updates were committed, and how many by one group each: `{"step": ..., "batches_committed": ...}`."""
        if self._manager is not None:
            self._counts = {name: int(value) for name, value in self._manager.state_dict().items()}
        return dict(self._counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint. Groups at different steps heal from one that is ahead."""
        self._counts = dict(state)
        if self._manager is not None:
            self._manager.load_state_dict(dict(state))

    def leave(self) -> None:
        """Leave the other groups, which go on without this one; the next `open` joins them again."""
        self.state_dict()
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.shutdown(wait=False)
            self._process_group.shutdown()
            self._process_group = self._store = None


class WaitAbandonedError(TrainingAbandoned):
    """The ranks of this group have agreed to wait no longer for the other groups, since one of them was asked to stop."""


class ReplicaSizeError(ValueError):
    """Replica groups of different sizes have met, and this one is to leave."""


class OtherSizeMet(Exception):
    """Replica groups of different sizes have met, and another one is to leave."""


def check_sizes(own: str, ids: Sequence[str], *, is_behind: bool, groups_ahead: int) -> None:
    """Raise an error where the groups that meet have different numbers of ranks: the ranks without a partner would wait for one.

    All ranks of a group decide alike, from what all of them are told. A group that trains stays; where groups begin together, those
    stay that have as many ranks as the one with the lowest name.
    """
    # The name of a group says how many ranks it has.
    names = sorted(member.partition(":")[0].partition("-ranks-")[::2] for member in ids)
    sizes = [ranks for _, ranks in names]
    name, _, mine = own.partition("-ranks-")
    if len(set(sizes)) == 1:
        return
    counts = {size: sizes.count(size) for size in sizes}
    if is_behind:
        stays = all(counts[mine] > count for size, count in counts.items() if size != mine)
    else:
        stays = counts[mine] >= groups_ahead or mine == sizes[0]
    if stays:
        raise OtherSizeMet
    others = ", ".join(f"{other} with {ranks}" for other, ranks in names if ranks != mine)
    raise ReplicaSizeError(
        f"Expected replica groups of one size. Received: {name} with {mine} ranks, and {others}. Start this group with as many "
        "processes as the others have; they go on without it."
    )


class _DaemonExecutor(Executor):
    """Runs each call in a thread that the end of the process does not wait for; TorchFT makes one at a time."""

    def submit(self, fn: Callable[..., object], /, *args: Any, **options: Any) -> Future[Any]:
        """Start a call and return its future."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="danling-quorum", daemon=True).start()
        return future


def _manager(groups: ReplicaGroups, **options: Any) -> Any:
    from torchft import Manager

    class InterruptibleManager(Manager):  # type: ignore[misc, unused-ignore]
        """Waits for the quorum of a new update in slices, between which the ranks of the group agree to go on waiting.

        The wait itself is for the timeout of the quorum, which is longer than the time that schedulers leave after SIGTERM.
        """

        def __init__(self) -> None:
            self._in_start = False
            super().__init__(**options)
            self._client: Any = _CheckedClient(self._client, options["replica_id"])
            # Python waits at its exit for the threads of the other kind, and a request to a lighthouse that is gone takes its time.
            self._executor.shutdown()
            self._executor: Any = _DaemonExecutor()

        def start_quorum(self, *args: Any, **options: Any) -> None:
            self._in_start = True
            super().start_quorum(*args, **options)

        def wait_quorum(self) -> None:
            # Once: what takes the state of another group asks for the quorum again, and not on all ranks.
            if self._in_start:
                self._in_start = False
                while groups.keeps_waiting(not wait([self._quorum_future], timeout=_SLICE).done):
                    continue
            super().wait_quorum()

    return InterruptibleManager()


class _CheckedClient:
    """Asks for the quorum as TorchFT's client does, and looks at the sizes of the groups before anything is made of it."""

    def __init__(self, client: Any, own: str) -> None:
        self._asked = client
        self._own = own

    def __getattr__(self, name: str) -> object:
        return getattr(self._asked, name)

    def _quorum(self, *, step: int, **options: Any) -> object:
        quorum = self._asked._quorum(step=step, **options)
        ahead = int(quorum.max_world_size)
        check_sizes(self._own, quorum.replica_ids, is_behind=step < quorum.max_step, groups_ahead=ahead)
        return quorum


def address_towards(url: str) -> str:
    """Return the address under which this machine is seen from where `url` leads: no look-up of its own name is needed."""
    found = socket.getaddrinfo(*_host_and_port(url), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Of a datagram socket: nothing is sent.
        probe.connect(target)
        host: str = probe.getsockname()[0]
    return host


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"//{url}")
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"Expected {LIGHTHOUSE} to hold an address such as http://127.0.0.1:29510. Received: {url!r}.")
    return parts.hostname, parts.port


def _process_group(backend: str, timeout: timedelta) -> Any:
    import torchft

    # Said at every quorum by every build of torch without NCCL.
    logging.getLogger("torchft.manager").addFilter(lambda record: "NCCL flight recorder" not in record.getMessage())
    kinds = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
    return kinds[backend](timeout=timeout)


def _transport(host: str, timeout: timedelta) -> Any:
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc, type-arg, unused-ignore]
        """Serves under an address that the other groups reach; the name of a machine need not resolve elsewhere."""

        def address(self) -> str:
            return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    transport = Transport(timeout=timeout, num_chunks=0)
    # The server of the standard library prints a line for each request.
    transport._server.RequestHandlerClass.log_message = lambda *_: None
    return transport
