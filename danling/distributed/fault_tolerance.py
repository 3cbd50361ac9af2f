"""Replica groups that may come and go: quorum, commit, healing, and sums over those that take part, by TorchFT."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.utils._pytree import tree_map_only

from danling.utils.tensors import local_part

from .domain import Domain

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse."""

_BUCKET_BYTES = 32 << 20


class QuorumError(RuntimeError):
    """The replica groups could not agree on who takes part, or on any update."""


@dataclass(frozen=True)
class ReplicaSettings:
    """Where this group stands among the replica groups.

    Attributes:
        replica_id: This group, from 0.
        group_size: Number of groups when all are there.
        min_replica_size: Groups that an update needs.
        process_group: Backend between the groups: `"gloo"` or `"nccl"`.
        timeout: Seconds that a collective between the groups, and the transfer of a state, may take.
        quorum_timeout: Seconds to wait for the other groups before an update.
        max_failures: Updates in a row that may fail to be committed; `None` for any number.
    """

    replica_id: int = 0
    group_size: int = 1
    min_replica_size: int = 1
    process_group: str = "gloo"
    timeout: float = 10.0
    quorum_timeout: float = 60.0
    max_failures: int | None = 100


class ReplicaGroups:
    """What a process says to the processes of its rank in the other replica groups.

    An update is `open`, forward and backward, `all_reduce` and `reduce_gradients`, `commit`. Until `commit` returns True nothing may
    change. Errors of a collective are kept until then: they make this update fail, on all ranks of the group. Which groups take
    part is agreed anew, and before the forward begins, in each `open`: a healed group takes part at once with the weights of the
    others, and the state that is sent is not being changed.

    Construct, and call every method, on all ranks of the group.

    Attributes:
        settings: The settings.
        failures: Updates in a row that were not committed.

    Args:
        settings: Where this group stands.
        group: All ranks of this group.
        state_dict: Returns the state that another group heals from: of this rank, without communication. Called in a thread while
            `open` waits.
        load_state_dict: Takes such a state of the same rank of another group. Called in `open`.

    Raises:
        ImportError: If torchft is not installed.
        ValueError: If the environment does not name a lighthouse.
        QuorumError: If the lighthouse cannot be reached.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        group: Domain,
        state_dict: Callable[[], Any],
        load_state_dict: Callable[[Any], None],
    ) -> None:
        require_torchft()
        lighthouse = lighthouse_address()
        self.settings = settings
        self.failures = 0
        self._load = load_state_dict
        self._healed = False
        self._healing = False
        self._asks = "the lighthouse" if group.rank == 0 else "rank 0 of this group, which asks the lighthouse"
        self._device = group.device if settings.process_group == "nccl" else torch.device("cpu")
        self._pg = _process_group(settings)
        try:
            self._manager: Any = self._build_manager(lighthouse, group, state_dict)
        except Exception as error:
            raise QuorumError(
                f"Expected a lighthouse of TorchFT at {lighthouse}. Received: {error}. Start one with "
                f"`torchft_lighthouse --min_replicas 1`, and set {LIGHTHOUSE} to its address."
            ) from error

    def _build_manager(self, lighthouse: str, group: Domain, state_dict: Callable[[], Any]) -> Any:
        from torchft import Manager

        settings = self.settings
        host = address_towards(lighthouse)
        # A store of its own for every attempt: that of the launcher may still hold the addresses of an earlier one.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if group.rank == 0 else None
        port = group.broadcast_object(self._store.port if self._store is not None else None)
        return Manager(
            pg=self._pg,
            load_state_dict=self._heal,
            state_dict=state_dict,
            min_replica_size=settings.min_replica_size,
            use_async_quorum=False,
            timeout=timedelta(seconds=settings.timeout),
            quorum_timeout=timedelta(seconds=settings.quorum_timeout),
            connect_timeout=timedelta(seconds=settings.timeout),
            rank=group.rank,
            world_size=group.size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica-{settings.replica_id:06d}",
            hostname=host,
            checkpoint_transport=_transport(host, settings.quorum_timeout),
        )

    # One update

    def open(self) -> bool:
        """Agree with the other groups on who takes part in the next update, and heal where this group is behind.

        Returns:
            Whether this rank was given the state of another group.

        Raises:
            QuorumError: If there is no agreement in time, as when the lighthouse is gone.
        """
        self._healed = False
        try:
            self._manager.start_quorum()
        except Exception as error:
            if self._healing:
                raise
            raise QuorumError(
                f"Expected {self._asks} at {lighthouse_address()}, to name the replica groups of the next update within "
                f"{self.settings.quorum_timeout:g} seconds. Received: {error}. See that the lighthouse runs, and start the replica "
                "groups again: they go on from the last checkpoint."
            ) from error
        return self._healed

    def _heal(self, state: Any) -> None:
        self._healing = True
        # The tensors lie in the bytes that were received, which must not be written to.
        self._load(tree_map_only(Tensor, torch.clone, state))
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
        gradients = [_local_gradient(p) for p, there in zip(parameters, present, strict=True) if there]
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            if not (isinstance(factor, float) and factor == 1.0):
                flat.mul_(factor)
            self.all_reduce(flat)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, summed in zip(bucket, torch.split(flat, sizes)):
                gradient.copy_(summed.view_as(gradient))

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the groups that take part."""
        for bucket in _buckets(tensors):
            flat = self.all_reduce(torch.cat([tensor.reshape(-1) for tensor in bucket])).div_(self.num_participants)
            for tensor, mean in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket])):
                tensor.copy_(mean.view_as(tensor))

    def commit(self) -> bool:
        """Whether the update may be made: no rank of this group met an error, and enough groups took part.

        Raises:
            QuorumError: If it has failed too often in a row.
        """
        if self._manager.should_commit():
            self.failures = 0
            return True
        self.failures += 1
        limit = self.settings.max_failures
        if limit is not None and self.failures > limit:
            raise QuorumError(
                f"Expected an update to be committed after at most {limit} attempts. Received: {self.failures} failures in a row, the "
                f"last one: {self._last_error()}. Look at the network between the replica groups, raise "
                "ft.process_group_timeout_ms, or lower ft.min_replica_size."
            )
        return False

    def _last_error(self) -> str:
        error = self._manager.errored()
        reason = f"{self.num_participants} replica groups of {self.settings.min_replica_size}"
        return str(error.original_exception) if error is not None else reason

    # Standing

    @property
    def num_participants(self) -> int:
        """Groups that take part in the open update, or took part in the last one; 0 before the first."""
        return int(self._manager.num_participants())

    @property
    def participating_rank(self) -> int | None:
        """Place of this group among them."""
        rank: int | None = self._manager.participating_rank()
        return rank

    def state_dict(self) -> dict[str, int]:
        """Return how many updates were committed, and how many by one group each: `{"step": ..., "batches_committed": ...}`."""
        return {name: int(value) for name, value in self._manager.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a checkpoint. Groups at different steps heal from one that is ahead."""
        self._manager.load_state_dict(dict(state))

    def close(self) -> None:
        """Leave the other groups; they go on without this one."""
        self._manager.shutdown(wait=False)
        self._pg.shutdown()
        self._store = None


def require_torchft() -> None:
    """Import torchft.

    Raises:
        ImportError: If it is not installed, with what installs it.
    """
    try:
        import torchft  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Expected torchft to be installed for ft.enabled. Received: {error}. Install it with `pip install 'danling[torchft]'`."
        ) from error


def lighthouse_address() -> str:
    """Return the address of the lighthouse.

    Raises:
        ValueError: If the environment does not name one.
    """
    address = os.environ.get(LIGHTHOUSE, "")
    if not address:
        raise ValueError(
            f"Expected {LIGHTHOUSE} to hold the address of a lighthouse, such as http://127.0.0.1:29510. Received: nothing. Start one "
            f"with `torchft_lighthouse --min_replicas 1` and set {LIGHTHOUSE} for every replica group."
        )
    return address


def address_towards(url: str) -> str:
    """Return the address under which this machine is seen from where `url` leads: no look-up of its own name is needed.

    Args:
        url: Such as `http://host:port`.
    """
    parts = urlsplit(url if "//" in url else f"//{url}")
    found = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Of a datagram socket: nothing is sent.
        probe.connect(target)
        host: str = probe.getsockname()[0]
    return host


def _process_group(settings: ReplicaSettings) -> Any:
    import torchft

    # Said at every quorum by every build of torch without NCCL.
    logging.getLogger("torchft.manager").addFilter(lambda record: "NCCL flight recorder" not in record.getMessage())
    kinds = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
    return kinds[settings.process_group](timeout=timedelta(seconds=settings.timeout))


def _transport(host: str, timeout: float) -> Any:
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc, type-arg, unused-ignore]
        """Serves under an address that the other groups reach; the name of a machine need not resolve elsewhere."""

        def address(self) -> str:
            return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    transport = Transport(timeout=timedelta(seconds=timeout), num_chunks=0)
    # The server of the standard library prints a line for each request.
    transport._server.RequestHandlerClass.log_message = lambda *_: None
    return transport


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of one dtype and device and of some megabytes, in the same order everywhere."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        open_buckets.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
        if sizes[key] >= _BUCKET_BYTES:
            yield open_buckets.pop(key)
            del sizes[key]
    yield from open_buckets.values()
