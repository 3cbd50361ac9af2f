"""Memory that is registered once with a transfer library and used again and again."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable

import torch
from torch import Tensor

_SMALLEST = 64 << 10


class BufferPool:
    """Registered blocks of memory. A tensor that leases one gives it back when nothing refers to its memory any more.

    Args:
        register: Registers memory, given its address and its bytes.
        unregister: Takes that back, given the address.
        keep_bytes: Bytes of blocks that are not in use and are kept nevertheless.
    """

    def __init__(
        self, register: Callable[[int, int], None], unregister: Callable[[int], None], keep_bytes: int
    ) -> None:
        self._register = register
        self._unregister = unregister
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        # Filled while garbage is collected, which may be in the middle of anything: without a lock.
        self._returned: deque[Tensor] = deque()
        self._blocks = 0

    def lease(self, size: int) -> Tensor:
        """Return registered memory that nobody else uses.

        Args:
            size: Its bytes.

        Returns:
            A tensor of bytes, at least as many, contiguous and aligned to 64 bytes.
        """
        length = max(_SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            self._take_back()
            block = self._free[length].pop() if self._free[length] else None
        if block is None:
            block = torch.empty(length, dtype=torch.uint8)
            self._register(block.data_ptr(), length)
            with self._lock:
                self._blocks += 1
        memory = (ctypes.c_ubyte * length).from_address(block.data_ptr())
        # Not at exit: what is registered is gone with the process.
        weakref.finalize(memory, self._returned.append, block).atexit = False
        # The tensor keeps `memory` alive, and so does every tensor that is made of it.
        return torch.frombuffer(memory, dtype=torch.uint8)

    def blocks(self) -> int:
        """Return the number of blocks that are registered, in use or not."""
        with self._lock:
            self._take_back()
            return self._blocks

    def close(self) -> None:
        """Take back the registration of all blocks that are not in use; the others keep their memory and lose it later."""
        with self._lock:
            self._keep_bytes = 0
            self._take_back()

    def _take_back(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._free[block.numel()].append(block)
        spare = sum(length * len(blocks) for length, blocks in self._free.items())
        for length in sorted(self._free, reverse=True):
            while spare > self._keep_bytes and self._free[length]:
                self._unregister(self._free[length].pop().data_ptr())
                self._blocks -= 1
                spare -= length
