"""What TorchFT is given and told otherwise: how a group waits, which groups fit together, and where it is reached."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from danling.training.session import IntactStateError, TrainingAbandoned

_SLICE = 0.5
"""Seconds of waiting for a quorum between two looks at what this rank is asked."""

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse."""


class QuorumError(IntactStateError):
    """The replica groups could not agree on who takes part, or on any update."""


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
        "processes as the others have; they continue without it."
    )


class _DaemonExecutor(Executor):
    """Runs each call in a thread that the end of the process does not wait for; TorchFT makes one at a time."""

    def submit(self, fn: Callable[..., object], /, *args: Any, **options: Any) -> Future[Any]:
        """Start a call and return its future."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **options))
            # SystemExit as well: who waits for the future has to get what ended the call.
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="danling-quorum", daemon=True).start()
        return future


def make_manager(keeps_waiting: Callable[[bool], bool], **options: Any) -> Any:
    """Return a manager of TorchFT."""
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
                # Agreed in each slice: a rank that stopped to wait alone would leave the others in the collective.
                while keeps_waiting(not wait([self._quorum_future], timeout=_SLICE).done):
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
        check_sizes(
            self._own, quorum.replica_ids, is_behind=step < quorum.max_step, groups_ahead=ahead
        )
        return quorum


def address_towards(url: str) -> str:
    """Return the address under which this machine is seen from where `url` leads: no look-up of its own name is needed."""
    found = socket.getaddrinfo(*host_and_port(url), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[
        0
    ]
    with socket.socket(family, kind, protocol) as probe:
        # Of a datagram socket: nothing is sent.
        probe.connect(target)
        host: str = probe.getsockname()[0]
    return host


def host_and_port(url: str) -> tuple[str, int]:
    """Return where `url` leads."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    if parts.hostname is None or parts.port is None:
        raise ValueError(
            f"Expected {LIGHTHOUSE} to be an address such as http://127.0.0.1:29510. Received: {url!r}."
        )
    return parts.hostname, parts.port


def process_group(backend: str, timeout: timedelta) -> Any:
    """Return a group of TorchFT's, which can be made anew."""
    import torchft

    # Said at every quorum by every build of torch without NCCL.
    logging.getLogger("torchft.manager").addFilter(
        lambda record: "NCCL flight recorder" not in record.getMessage()
    )
    kinds = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}
    return kinds[backend](timeout=timeout)


def transport(host: str, timeout: timedelta) -> Any:
    """Return what sends the state of this rank to a group that heals."""
    from torchft.checkpointing import HTTPTransport

    class Transport(HTTPTransport):  # type: ignore[misc, type-arg, unused-ignore]
        """Serves under an address that the other groups reach; the name of a machine need not resolve elsewhere."""

        def address(self) -> str:
            return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    server = Transport(timeout=timeout, num_chunks=0)
    # The server of the standard library prints a line for each request.
    server._server.RequestHandlerClass.log_message = lambda *_: None
    return server
