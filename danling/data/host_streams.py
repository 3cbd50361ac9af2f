"""The three streams of a process's host side, saved and put back quickly enough to do it at every batch."""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from types import ModuleType
from typing import Any

import torch

_MT19937_BYTES = 624 * 4 + 4  # the words, then the position as a 32-bit integer

_numpy: list[ModuleType | None] = []


def get_numpy() -> ModuleType | None:
    """Return NumPy, or `None` where it is not installed."""
    if not _numpy:
        try:
            _numpy.append(importlib.import_module("numpy"))
        except ImportError:
            _numpy.append(None)
    return _numpy[0]


def seed_numpy(seed: int) -> None:
    """Seed NumPy's global stream, where NumPy is installed.

    Args:
        seed: An integer of 32 bits.
    """
    numpy = _numpy[0] if _numpy else get_numpy()
    if numpy is None:
        return
    try:
        numpy.random.seed(seed)
    except TypeError:
        # The user has put another bit generator than MT19937 in place, which `seed` refuses.
        current = numpy.random.get_bit_generator()
        current.state = type(current)(seed).state


class NumpyStream:
    """NumPy's global stream.

    `get_state` and `set_state` take 40 us each, because NumPy copies the 624 words one by one. The words are read and
    written in place instead, through the address that NumPy publishes (`BitGenerator.ctypes`), provided that what lies
    there is what `get_state` says. The normal deviate that NumPy may hold back is not among the words: a state that has
    one goes the slow way.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address: int | None = None
        self._known: bytes | None = None

    def forget(self) -> None:
        """Look at the whole state at the next `save`."""
        self._known = None

    def save(self) -> Any:
        """Return the state; to be given back to `put_back` as it is."""
        numpy = get_numpy()
        if numpy is None:
            return None
        self._find(numpy)
        if self._address is None:
            return numpy.random.get_state(legacy=False)
        words = ctypes.string_at(self._address, _MT19937_BYTES)
        if words == self._known:
            return words
        state = numpy.random.get_state(legacy=False)
        if state["has_gauss"]:
            self._known = None
            return state
        # Drawing always changes the words unless a deviate is held back, so equal words are an equal state from here
        # on.
        self._known = words
        return words

    def put_back(self, state: Any) -> None:
        """Put a saved state back."""
        numpy = get_numpy()
        if numpy is None or state is None:
            return
        if not isinstance(state, bytes):
            self._known = None
            numpy.random.set_state(state)
            return
        numpy.random.seed(0)  # drops a deviate that was held back in between
        assert self._address is not None
        ctypes.memmove(self._address, state, _MT19937_BYTES)

    def _find(self, numpy: ModuleType) -> None:
        current = numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None
        if current is not self._generator:
            self._generator, self._known = current, None
            self._address = _mt19937_address(current)


def _mt19937_address(generator: Any) -> int | None:
    """Return where the state of an MT19937 generator lies; `None` for another one, or an unknown layout."""
    if type(generator).__name__ != "MT19937":
        return None
    address = int(generator.ctypes.state_address)
    state = generator.state["state"]
    expected = state["key"].astype("uint32").tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return address if ctypes.string_at(address, _MT19937_BYTES) == expected else None


class HostStreams:
    """torch's CPU generator, NumPy's and Python's global streams together; about 20 us to save and put back."""

    def __init__(self) -> None:
        self._numpy_stream = NumpyStream()

    def forget(self) -> None:
        """Make no assumption about the streams at the next `save`; call after setting them by other means."""
        self._numpy_stream.forget()

    def save(self) -> tuple[Any, Any, Any]:
        """Return the streams' state; to be given back to `put_back` as it is."""
        return torch.default_generator.get_state(), random.getstate(), self._numpy_stream.save()

    def put_back(self, state: tuple[Any, Any, Any]) -> None:
        """Put the streams back into a saved state."""
        torch.default_generator.set_state(state[0])
        random.setstate(state[1])
        self._numpy_stream.put_back(state[2])


HOST_STREAMS = HostStreams()
"""The one of this process: the streams are global, so there is nothing to have two of."""
