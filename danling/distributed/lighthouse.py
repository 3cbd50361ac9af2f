"""A place among the replica groups of TorchFT: the lighthouse, and what a rank runs to be part of them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch._C._distributed_c10d import TCPStore

from .domain import Domain

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of the lighthouse."""


class Membership:
    """The manager of TorchFT of one rank, its process group and its store. Construct on all ranks of the group.

    Args:
        lighthouse: Address of the lighthouse.
        group: All ranks of this group.
        backend: `"gloo"` or `"nccl"`, between the groups.
        timeout: Seconds that a collective between the groups may take.
        quorum_timeout: Seconds to wait for the other groups, and for another group to fetch a state.
        replica_id: Name of this group; names order the groups.
        min_replica_size: Groups that an update needs.
        state_dict: Returns the state that another group heals from.
        load_state_dict: Takes such a state.
    """

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
        state_dict: Callable[[], Any],
        load_state_dict: Callable[[Any], None],
    ) -> None:
        from torchft import Manager

        host = address_towards(lighthouse)
        # A store of its own for every attempt: that of the launcher may still hold the addresses of an earlier one.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if group.rank == 0 else None
        address, port = group.broadcast_object((host, self._store.port if self._store is not None else 0))
        self._process_group = _process_group(backend, timeout)
        self.manager: Any = Manager(
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
            replica_id=replica_id,
            hostname=host,
            checkpoint_transport=_transport(host, quorum_timeout),
        )

    def close(self) -> None:
        """Leave; the other groups go on without this one."""
        self.manager.shutdown(wait=False)
        self._process_group.shutdown()
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
    found = socket.getaddrinfo(*_host_and_port(url), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, target = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Of a datagram socket: nothing is sent.
        probe.connect(target)
        host: str = probe.getsockname()[0]
    return host


def reach(url: str, timeout: float) -> None:
    """Find out whether anything listens where `url` leads.

    Args:
        url: Such as `http://host:port`.
        timeout: Seconds to wait.

    Raises:
        OSError: If nothing does.
    """
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
