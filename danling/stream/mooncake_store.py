"""Features in the memory of other machines, through the store of Mooncake."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from danling.utils.plain import parse_json

from .refs import TensorSpec
from .store import CheckedStore, check_sum, check_tensors, checksum, specs_of

# What its calls return (mooncake-store/include/types.h).
_FULL, _TOO_SMALL, _UNFINISHED, _MISSING = -200, -600, -703, -704
_REACH_SECONDS = 10.0
_METRICS_PORT = 9003
_ALLOCATED = "master_allocated_bytes "
_LEAST_LENT = 16 << 20
_OWN_BUFFER = 1 << 20
"""Bytes of the buffer that Mooncake keeps for calls without registered memory, of which none is made here."""

_SMALLEST_BLOCK = 64 << 10

# An object is a header in JSON behind this and its length, and the tensors behind it, each aligned.
_MAGIC = b"danling1"
_ALIGNMENT = 64
# As long as a checksum, so that the size of a header is known before its sum is.
_NO_SUM = "0" * 8


class MooncakeStore(CheckedStore):
    """A store in the memory that processes lend to a Mooncake master.

    `put` writes an object into registered memory, from which it goes over the network; `get` receives it in registered memory and copies
    it from there. Objects are pinned, so that Mooncake frees none by itself, and removed by force, since a reader has a lease on them.

    Objects are in the memory of the processes that lend it, and go with them: let a process lend it that is neither the producer nor
    the trainer (`mooncake_client --global_segment_size=...`), for either may be killed. What a writer that is killed in the middle has
    reserved is no object, and the master frees it by itself (`--put_start_release_timeout_sec`, 600 by default). Where two processes put
    one name at the same instant, the bytes of the later one stay.

    Args:
        master: Address of `mooncake_master`, such as `10.0.0.1:50051`.
        namespace: Beginning of all keys; each stream has its own.
        host: Address of this machine that others reach.
        lend_bytes: Bytes of memory that this process lends.
        keep_bytes: Bytes of registered memory that are kept for the next call.
        protocol: `tcp` or `rdma`.
        devices: Names of RDMA devices, separated by commas.
        metrics: Address of the metrics of the master, from which `usage` is read; by default the port 9003 of its host, which is that of
            `mooncake_master`.

    Raises:
        ImportError: If Mooncake cannot be imported.
        ConnectionError: If the master or its metrics cannot be reached.
    """

    def __init__(
        self,
        master: str,
        *,
        namespace: str = "danling",
        host: str = "127.0.0.1",
        lend_bytes: int = 0,
        keep_bytes: int = 256 << 20,
        protocol: str = "tcp",
        devices: str = "",
        metrics: str | None = None,
    ) -> None:
        library = _library()
        self.master = master
        self.namespace = namespace
        self._metrics = metrics or f"{master.rpartition(':')[0]}:{_METRICS_PORT}"
        self._pid = os.getpid()
        if 0 < lend_bytes < _LEAST_LENT:
            raise ValueError(
                f"Expected to lend no memory or at least {_LEAST_LENT} bytes of it. Received: lend_bytes={lend_bytes}."
            )
        _check_reachable(master)
        self.usage()  # whose error says that the metrics cannot be reached
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._store = library.MooncakeDistributedStore()
        code = self._store.setup(
            host, "P2PHANDSHAKE", lend_bytes, _OWN_BUFFER, protocol, devices, master
        )
        if code:
            raise ConnectionError(
                f"Expected to join the store of Mooncake at {master} from {host} over {protocol}. Received: its error {code}. "
                "See to it that the master runs, and that host, protocol and devices are those of this machine."
            )
        self._pool = BufferPool(self._store, keep_bytes)

    def put(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        """Write an object; see `FeatureStore.put`.

        Raises:
            BufferError: If the memory that is lent is full.
        """
        self._check_process()
        check_tensors(f"object {object_id!r}", tensors)
        plain = {
            name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()
        }
        size = packed_size(object_id, specs_of(plain))
        with self._pool.lease(size) as memory:
            packed = pack(memory, object_id, plain)
            # Asked first, since a put of a name that is taken keeps its bytes and Mooncake says nothing of it. An upsert also replaces
            # what a killed writer has begun, which no reader sees.
            if self._read(object_id, size) is not None:
                self._check_same(object_id, packed)
                return
            code = self._store.upsert_from(
                self._key(object_id), memory.data_ptr(), size, self._pinned
            )
        if code == _FULL:
            raise BufferError(
                f"Expected room for object {object_id!r} of {size} bytes in the memory that is lent to {self.master}. Received: "
                "it is full. Lend more, or lower the number of samples that the producer may be ahead."
            )
        if code:
            raise self._failed(f"write object {object_id!r}", code)

    def _place(self, object_id: str) -> str:
        return f"the store at {self.master}"

    def _load(self, object_id: str, expected: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        self._check_process()
        memory = self._read(object_id, packed_size(object_id, expected))
        if memory is None:
            raise KeyError(object_id)
        return unpack(memory, object_id)

    def _read(self, object_id: str, size: int) -> Tensor | None:
        """Return a copy of the bytes of an object, `None` when there is none, or none that is whole."""
        while True:
            with self._pool.lease(size) as memory:
                read = self._store.get_into(self._key(object_id), memory.data_ptr(), memory.numel())
                if read >= 0:
                    # A copy: the block goes back to the pool, where the next call overwrites it.
                    return memory[:read].clone()
                # It may be larger than its reference says, which the caller checks.
                size = 2 * memory.numel()
            if read in (_MISSING, _UNFINISHED):
                return None
            if read != _TOO_SMALL:
                raise self._failed(f"read object {object_id!r}", read)

    def discard(self, object_ids: Iterable[str]) -> None:
        """Free objects; see `FeatureStore.discard`.

        Raises:
            OSError: If one is there and cannot be freed.
        """
        self._check_process()
        wanted = list(dict.fromkeys(object_ids))
        if not wanted:
            return
        # By force and without asking first: a question, like a read, is a lease for which `remove` is refused.
        codes = self._store.batch_remove([self._key(object_id) for object_id in wanted], True)
        for object_id, code in zip(wanted, codes):
            if code not in (0, _MISSING, _UNFINISHED):
                raise self._failed(f"free object {object_id!r}", code)

    def usage(self) -> int:
        """Return the bytes of all objects of the master, whichever stream they are of.

        Raises:
            ConnectionError: If its metrics cannot be read.
        """
        try:
            with closing(HTTPConnection(self._metrics, timeout=_REACH_SECONDS)) as connection:
                connection.request("GET", "/metrics")
                lines = connection.getresponse().read().decode().splitlines()
            return next(
                int(float(line.split()[1])) for line in lines if line.startswith(_ALLOCATED)
            )
        except (OSError, HTTPException, ValueError, StopIteration) as error:
            received = "none of allocated bytes" if isinstance(error, StopIteration) else str(error)
            raise ConnectionError(
                f"Expected the metrics of mooncake_master at {self._metrics}. Received: {received}. "
                "Name its host and metrics_port in `metrics`."
            ) from error

    def close(self) -> None:
        # A forked child has only a copy of the connection, and must not end that of its parent.
        if os.getpid() == self._pid and self._store is not None:
            self._pool.close()
            self._store.close()
            self._store = None

    def _key(self, object_id: str) -> str:
        return f"{self.namespace}/{quote(object_id, errors='surrogatepass')}"

    def _failed(self, what: str, code: int) -> OSError:
        return OSError(
            errno.EIO,
            f"Expected to {what} in the store of Mooncake at {self.master}. Received: its error {code}. "
            "See to it that the master runs, and the processes that lend memory to it.",
        )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MooncakeStore to be used in the process that made it ({self._pid}), which alone is connected. "
                f"Received: process {os.getpid()}. Make another one there."
            )
        if self._store is None:
            raise ValueError(
                f"Expected a MooncakeStore that is open. Received: the one at {self.master} after close. Make another one."
            )


def _library() -> Any:
    try:
        import mooncake.store
    except ImportError as error:
        raise ImportError(
            f"Expected Mooncake to be installed for a MooncakeStore. Received: {error}. "
            "Run `pip install mooncake-transfer-engine-non-cuda` (mooncake-transfer-engine where there is a CUDA driver), "
            "and install libibverbs1 of the system."
        ) from error
    return mooncake.store


def _check_reachable(master: str) -> None:
    """Check that something answers at once: Mooncake itself tries for a minute and a half, and says no more than -1."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _REACH_SECONDS).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"Expected mooncake_master at {master!r}. Received: {error}. "
            "Start it (`mooncake_master --rpc_port=...`), or name its host:port."
        ) from error


class BufferPool:
    """Registered blocks of memory, which are used again."""

    def __init__(self, store: Any, keep_bytes: int) -> None:
        self._store = store
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: list[Tensor] = []

    @contextmanager
    def lease(self, size: int) -> Iterator[Tensor]:
        """Yield registered memory that no other call uses meanwhile."""
        # Powers of two, so that a block fits many later calls.
        length = max(_SMALLEST_BLOCK, 1 << (size - 1).bit_length())
        with self._lock:
            fitting = [place for place, free in enumerate(self._free) if free.numel() == length]
            block = self._free.pop(fitting[0]) if fitting else None
        if block is None:
            block = torch.empty(length, dtype=torch.uint8)
            if code := self._store.register_buffer(block.data_ptr(), length):
                raise OSError(
                    errno.EIO,
                    f"Expected to register {length} bytes of memory with Mooncake. Received: its error {code}.",
                )
        try:
            yield block
        finally:
            with self._lock:
                self._free.append(block)
                # The oldest go first: a size that is still in use comes back to the end.
                while sum(free.numel() for free in self._free) > self._keep_bytes:
                    self._store.unregister_buffer(self._free.pop(0).data_ptr())

    def close(self) -> None:
        """Take back the registration of all blocks."""
        with self._lock:
            while self._free:
                self._store.unregister_buffer(self._free.pop().data_ptr())


def _header(object_id: str, found: Mapping[str, TensorSpec], total: str) -> bytes:
    tensors = [[name, list(spec.shape), spec.dtype] for name, spec in found.items()]
    text = json.dumps({"object": object_id, "tensors": tensors, "checksum": total}).encode()
    start = _MAGIC + len(text).to_bytes(8, "little") + text
    return start.ljust(_aligned(len(start)), b" ")


def packed_size(object_id: str, found: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of a whole object."""
    return len(_header(object_id, found, _NO_SUM)) + sum(
        _aligned(spec.nbytes) for spec in found.values()
    )


def pack(memory: Tensor, object_id: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write an object, and return its tensors, which share its memory."""
    found = specs_of(tensors)
    places = _places(memory, len(_header(object_id, found, _NO_SUM)), found)
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    header = _header(object_id, found, checksum(object_id, places))
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return places


def unpack(memory: Tensor, object_id: str) -> dict[str, Tensor]:
    """Return the tensors of an object, which share its memory."""
    # By `tolist`, since `numpy()` needs a package that may be missing.
    begin = bytes(memory[:16].tolist())
    length = int.from_bytes(begin[8:], "little")
    if not begin.startswith(_MAGIC) or 16 + length > memory.numel():
        raise ValueError("a damaged object: it has no header")
    try:
        about = parse_json(bytes(memory[16 : 16 + length].tolist()))
        owner, written = about["object"], about["checksum"]
        found = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in about["tensors"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"a damaged object: {type(error).__name__}: {error}") from error
    if owner != object_id:
        raise ValueError(f"object {owner!r}")
    start = _aligned(16 + length)
    if start + sum(_aligned(spec.nbytes) for spec in found.values()) > memory.numel():
        raise ValueError(f"a damaged object: {memory.numel()} bytes are too few")
    tensors = _places(memory, start, found)
    check_sum(object_id, tensors, written)
    return tensors


def _places(memory: Tensor, start: int, found: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors of an object as parts of its memory."""
    places: dict[str, Tensor] = {}
    for name, spec in found.items():
        places[name] = memory[start : start + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
        start += _aligned(spec.nbytes)
    return places


def _aligned(size: int) -> int:
    # `Tensor.view` with a wider dtype refuses an offset that is no multiple of its size.
    return -(-size // _ALIGNMENT) * _ALIGNMENT
