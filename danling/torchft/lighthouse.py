"""A place among the replica groups of TorchFT: the lighthouse, and what a rank runs to be part of them."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import TCPStore

from danling.distributed.domain import Domain
from danling.training.session import TrainingAbandoned

_SLICE = 0.5
"""Seconds of waiting for a quorum between two looks at what this rank is asked."""

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse."""


class Membership:
    """The manager of TorchFT of one rank, its process group and its store. Construct on all ranks of the group."""

    def __init__(
        self,
        lighthouse: str,
        group: Domain,
        *,
        backend: str,
        timeout: float,
        quorum_timeout: float,
        replica_id: str,
        min_replica_size: int,
        state_dict: Callable[[], object],
        load_state_dict: Callable[[Any], None],
        asked_to_stop: Callable[[], bool],
    ) -> None:
        host = address_towards(lighthouse)
        # A store of its own for every attempt: that of the launcher may still hold the addresses of an earlier one.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if group.rank == 0 else None
        address, port = group.broadcast_object((host, self._store.port if self._store is not None else 0))
        self._process_group = _process_group(backend, timeout)
        self.manager: Any = _manager_class()(
            lambda waits: _agree_to_wait(group, waits, waits and asked_to_stop()),
            pg=self._process_group,
            load_state_dict=load_state_dict,
            state_dict=state_dict,
            min_replica_size=min_replica_size,
            # Before the forward: a healed group then takes part at once, and a state that is sent is not being changed.
            use_async_quorum=False,
            timeout=timedelta(seconds=timeout),
            quorum_timeout=timedelta(seconds=quorum_timeout),
            connect_timeout=timedelta(seconds=timeout),
            rank=group.rank,
            world_size=group.size,
            store_addr=address,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=sized_replica_id(replica_id, group.size),
            hostname=host,
            checkpoint_transport=_transport(host, quorum_timeout),
        )

    def close(self) -> None:
        """Leave; the other groups go on without this one."""
        self.manager.shutdown(wait=False)
        self._process_group.shutdown()
        self._store = None


class WaitAbandonedError(TrainingAbandoned):
    """The ranks of this group have agreed to wait no longer for the other groups, since one of them was asked to stop."""


def _agree_to_wait(group: Domain, waits: bool, stops: bool) -> bool:
    """Return whether a rank of the group still waits for the quorum. Call on all ranks of the group."""
    waiting, stopping = group.all_reduce(torch.tensor([float(waits), float(stops)], dtype=torch.float64)).tolist()
    if stopping:
        raise WaitAbandonedError
    return bool(waiting)


class ReplicaSizeError(ValueError):
    """Replica groups of different sizes have met, and this one is to leave."""


class OtherSizeMet(Exception):
    """Replica groups of different sizes have met, and another one is to leave."""


def sized_replica_id(name: str, ranks: int) -> str:
    """Return the name under which a group is known to the others, which tells them how many ranks it has."""
    return f"{name}-ranks-{ranks}"


def check_sizes(own: str, ids: Sequence[str], *, is_behind: bool, groups_ahead: int) -> None:
    """Raise an error where the groups that meet have different numbers of ranks: the ranks without a partner would wait for one.

    All ranks of a group decide alike, from what all of them are told. A group that trains stays; where groups begin together, those
    stay that have as many ranks as the one with the lowest name.
    """
    names = sorted(member.partition(":")[0] for member in ids)
    sizes = [_ranks_of(name) for name in names]
    mine = _ranks_of(own)
    if len(set(sizes)) == 1:
        return
    counts = {size: sizes.count(size) for size in sizes}
    if is_behind:
        stays = all(counts[mine] > count for size, count in counts.items() if size != mine)
    else:
        stays = counts[mine] >= groups_ahead or mine == sizes[0]
    if stays:
        raise OtherSizeMet
    others = ", ".join(
        f"{name.partition('-ranks-')[0]} with {size}" for name, size in zip(names, sizes) if size != mine
    )
    raise ReplicaSizeError(
        f"Expected replica groups of one size. Received: {own.partition('-ranks-')[0]} with {mine} ranks, and {others}. Start this "
        "group with as many processes as the others have; they go on without it."
    )


def _ranks_of(name: str) -> int:
    return int(name.rpartition("-ranks-")[2])


class DaemonExecutor(Executor):
    """Runs calls one after the other in a thread that the end of the process does not wait for."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=_run_calls, args=(self._calls,), name="danling-quorum", daemon=True).start()

    def submit(self, fn: Callable[..., object], /, *args: Any, **options: Any) -> Future[Any]:
        """Put a call at the end of the queue and return its future."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(fn, *args, **options)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after the calls that were put in before; it is not waited for."""
        self._calls.put(None)


def _run_calls(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        future, function = call
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


def _manager_class() -> Any:
    from torchft import Manager

    class InterruptibleManager(Manager):  # type: ignore[misc, unused-ignore]
        """Waits for the quorum of a new update in slices, between which the ranks of the group agree to go on waiting.

        The wait itself is for the timeout of the quorum, which is longer than the time that schedulers leave after SIGTERM.
        """

        _executor: Any

        def __init__(self, agree_to_wait: Callable[[bool], bool], **options: Any) -> None:
            self._agree_to_wait = agree_to_wait
            self._in_start = False
            super().__init__(**options)
            self._client: Any = _CheckedClient(self._client, options["replica_id"])
            # Python waits at its exit for the threads of the other kind, and a request to a lighthouse that is gone takes its time.
            self._executor.shutdown()
            self._executor = DaemonExecutor()

        def start_quorum(self, *args: Any, **options: Any) -> None:
            self._in_start = True
            try:
                super().start_quorum(*args, **options)
            finally:
                self._in_start = False

        def wait_quorum(self) -> None:
            if self._in_start:
                # Once: what takes the state of another group asks for the quorum again, and not on all ranks.
                self._in_start = False
                while self._agree_to_wait(not self._is_settled()):
                    continue
            super().wait_quorum()

        def _is_settled(self) -> bool:
            return bool(wait([self._quorum_future], timeout=_SLICE).done)

    return InterruptibleManager


class _CheckedClient:
    """Asks for the quorum as TorchFT's client does, and looks at the sizes of the groups before anything is made of it."""

    def __init__(self, client: Any, own: str) -> None:
        self._asked = client
        self._own = own

    def __getattr__(self, name: str) -> object:
        return getattr(self._asked, name)

    def _quorum(self, *, step: int, **options: Any) -> object:
        quorum = self._asked._quorum(step=step, **options)
        check_sizes(
            self._own, quorum.replica_ids, is_behind=step < quorum.max_step, groups_ahead=int(quorum.max_world_size)
        )
        return quorum


def require_torchft() -> None:
    """Import torchft."""
    try:
        import torchft  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Expected torchft to be installed for ft.enabled. Received: {error}. Install it with `pip install torchft-nightly`."
        ) from error


def lighthouse_address() -> str:
    """Return the address of the lighthouse."""
    address = os.environ.get(LIGHTHOUSE, "")
    if not address:
        raise ValueError(
            f"Expected {LIGHTHOUSE} to hold the address of a lighthouse, such as http://127.0.0.1:29510. Received: nothing. Start one "
            f"with `torchft_lighthouse --min_replicas 1` and set {LIGHTHOUSE} for every replica group."
        )
    return address


def address_towards(url: str) -> str:
    """Return the address under which this machine is seen from where `url` leads: no look-up of its own name is needed."""
    found = socket.getaddrinfo(*_host_and_port(url), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Of a datagram socket: nothing is sent.
        probe.connect(target)
        host: str = probe.getsockname()[0]
    return host


def reach(url: str, timeout: float) -> None:
    """Find out whether anything listens where `url` leads."""
    socket.create_connection(_host_and_port(url), timeout=timeout).close()


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url if "//" in url else f"//{url}")
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"Expected {LIGHTHOUSE} to hold an address such as http://127.0.0.1:29510. Received: {url!r}.")
    return parts.hostname, parts.port


def _process_group(backend: str, timeout: float) -> Any:
    import torchft

    # Said at every quorum by every build of torch without NCCL.
    logging.getLogger("torchft.manager").addFilter(_is_worth_saying)
    kinds = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
    return kinds[backend](timeout=timedelta(seconds=timeout))


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return "NCCL flight recorder" not in record.getMessage()


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
