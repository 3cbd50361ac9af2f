"""The three streams of a process's host side, saved, compared and put back quickly enough to do it at every batch."""

from __future__ import annotations

import _random
import ctypes
import importlib
import random
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

import torch

_MT19937_BYTES = 624 * 4 + 4  # the words and the position, a 32-bit integer
_APART = 0x6E6F626F64792073656564732074686973
"""What the private states of the streams follow from: 136 bits, so that no seed of 64 bits leads to one of them."""

_numpy: list[ModuleType | None] = []


def get_numpy() -> ModuleType | None:
    """Return NumPy, or `None` where it is not installed."""
    if not _numpy:
        try:
            _numpy.append(importlib.import_module("numpy"))
        except ImportError:
            _numpy.append(None)
    return _numpy[0]


class HostStream(ABC):
    """A global stream of random numbers of this process."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the stream with an integer of 63 bits."""

    @abstractmethod
    def save(self) -> Any:
        """Return the state; to be given back to `put_back` as it is."""

    @abstractmethod
    def put_back(self, state: Any) -> None:
        """Put a saved state back."""

    @abstractmethod
    def differs(self, state: Any) -> bool:
        """Return whether the stream is in another state than a saved one."""

    @abstractmethod
    def set_apart(self) -> bool:
        """Put the stream into a state that no seed leads to; return `False` where looking at the stream is slow.

        Whoever seeds the stream or draws from it afterwards leaves another state, also by a seed that was there before.
        """

    @abstractmethod
    def was_moved(self) -> bool:
        """Return whether the stream is in another state than `set_apart` has put it into."""


class TorchStream(HostStream):
    """torch's CPU generator."""

    def __init__(self) -> None:
        self._apart: Any = None
        self._apart_bytes = b""

    def seed(self, seed: int) -> None:
        """Seed it; `torch.manual_seed` also visits every accelerator, which is 200 times dearer."""
        torch.default_generator.manual_seed(seed)

    def save(self) -> Any:
        """Return the state, a tensor of 5 kB."""
        return torch.default_generator.get_state()

    def put_back(self, state: Any) -> None:
        """Put a saved state back."""
        torch.default_generator.set_state(state)

    def differs(self, state: Any) -> bool:
        """Compare the bytes, since `torch.equal` takes four times as long."""
        current = torch.default_generator.get_state()
        return _bytes_of(current) != _bytes_of(state)

    def set_apart(self) -> bool:
        """Put the stream into its private state."""
        if self._apart is None:
            own = torch.Generator().manual_seed(_APART & 0x7FFFFFFFFFFFFFFF)
            torch.rand(3, generator=own)  # a stream that was only seeded stands elsewhere
            self._apart = own.get_state()
            self._apart_bytes = _bytes_of(self._apart)
        torch.default_generator.set_state(self._apart)
        return True

    def was_moved(self) -> bool:
        """Compare the bytes."""
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), len(self._apart_bytes)) != self._apart_bytes


def _bytes_of(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class PythonStream(HostStream):
    """The stream of the module `random`.

    `getstate` and `setstate` take 10 us, because they make 625 integers of the state. Its words are read and written in place instead,
    where they lie as CPython lays them out, provided that what lies there is what `getstate` says.
    """

    def __init__(self) -> None:
        self._inst: Any = getattr(random.seed, "__self__", None)
        self._words: memoryview | None = None
        self._looked = False
        self._apart = b""

    def seed(self, seed: int) -> None:
        """Do what `random.seed` does of an integer."""
        _random.Random.seed(self._inst, seed)
        self._inst.gauss_next = None

    def save(self) -> Any:
        """Return the words and the normal deviate that may be held back."""
        words = self._words if self._looked else self._find()
        return random.getstate() if words is None else (bytes(words), self._inst.gauss_next)

    def put_back(self, state: Any) -> None:
        """Put a saved state back."""
        if len(state) == 3:
            random.setstate(state)
            return
        assert self._words is not None
        self._words[:], self._inst.gauss_next = state

    def differs(self, state: object) -> bool:
        """Compare the words, and the deviate that is held back."""
        return bool(self.save() != state)

    def set_apart(self) -> bool:
        """Put the stream into its private state."""
        words = self._words if self._looked else self._find()
        if words is None:
            return False
        if not self._apart:
            outside = self.save()
            random.seed(_APART)
            self._apart = bytes(words)
            self.put_back(outside)
        words[:] = self._apart
        self._inst.gauss_next = None
        return True

    def was_moved(self) -> bool:
        """Compare the words, which a deviate cannot be held back without."""
        return bytes(self._words or b"") != self._apart

    def _find(self) -> memoryview | None:
        self._looked = True
        if sys.implementation.name != "cpython" or not isinstance(self._inst, _random.Random):
            return None
        begin = object.__basicsize__
        if _random.Random.__basicsize__ - begin not in (_MT19937_BYTES, _MT19937_BYTES + 4):
            return None
        words = _memory(id(self._inst) + begin)
        state = random.getstate()[1]
        expected = b"".join(word.to_bytes(4, sys.byteorder) for word in (state[-1], *state[:-1]))
        self._words = words if bytes(words) == expected else None
        return self._words


def _memory(address: int) -> memoryview:
    """Return what lies at an address, as bytes that can be read and written."""
    return memoryview((ctypes.c_ubyte * _MT19937_BYTES).from_address(address)).cast("B")


class NumpyStream(HostStream):
    """NumPy's global stream.

    `get_state` and `set_state` take 40 us each, because NumPy copies the 624 words one by one. The words are read and
    written in place instead, through the address that NumPy publishes (`BitGenerator.ctypes`), provided that what lies
    there is what `get_state` says. The normal deviate that NumPy may hold back is not among the words: a state that has
    one goes the slow way.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: memoryview | None = None
        self._known: bytes | None = None
        """Words of which is known that no deviate is held back."""
        self._apart = b""

    def seed(self, seed: int) -> None:
        """Seed it with the lower 32 bits, where NumPy is installed."""
        numpy = _numpy[0] if _numpy else get_numpy()
        if numpy is None:
            return
        if self._find(numpy) is not None or type(self._generator).__name__ in ("MT19937", "NoneType"):
            numpy.random.seed(seed & 0xFFFFFFFF)
            return
        # Another bit generator than MT19937 is in its place: of that, `seed` would leave a deviate held back.
        if numpy.random.get_state(legacy=False)["has_gauss"]:
            numpy.random.standard_normal()
        current = numpy.random.get_bit_generator()
        current.state = type(current)(seed & 0xFFFFFFFF).state

    def forget(self) -> None:
        """Look at the whole state at the next `save`."""
        self._known = None

    def save(self) -> Any:
        """Return the state; to be given back to `put_back` as it is."""
        numpy = get_numpy()
        if numpy is None:
            return None
        held = self._find(numpy)
        if held is None:
            return numpy.random.get_state(legacy=False)
        words = bytes(held)
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

    def put_back(self, state: object) -> None:
        """Put a saved state back."""
        numpy = get_numpy()
        if numpy is None or state is None:
            return
        if not isinstance(state, bytes):
            self._known = None
            numpy.random.set_state(state)
            return
        assert self._words is not None
        if bytes(self._words) != self._known:
            numpy.random.seed(0)  # drops a deviate that was held back in between
        self._words[:] = state
        self._known = state

    def differs(self, state: object) -> bool:
        """Compare the words, and what is held back of a state that had a deviate."""
        numpy = get_numpy()
        if numpy is None or state is None:
            return False
        if isinstance(state, bytes):
            held = self._find(numpy)
            return held is None or bytes(held) != state
        return bool(_plain(self.save()) != _plain(state))

    def set_apart(self) -> bool:
        """Put the stream into its private state."""
        numpy = get_numpy()
        if numpy is None or self._find(numpy) is None:
            return False
        if not self._apart:
            self._apart = _words_of(numpy.random.MT19937(_APART).state["state"])
        self.put_back(self._apart)
        return True

    def was_moved(self) -> bool:
        """Compare the words, which a deviate cannot be held back without."""
        numpy = get_numpy()
        return numpy is not None and bytes(self._find(numpy) or b"") != self._apart

    def _find(self, numpy: ModuleType) -> memoryview | None:
        current = numpy.random.get_bit_generator() if hasattr(numpy.random, "get_bit_generator") else None
        if current is not self._generator:
            self._generator, self._known = current, None
            self._words = _mt19937_words(current)
        return self._words


def _plain(state: object) -> object:
    """Return a state of NumPy's with lists in the place of arrays, which can be compared."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _words_of(state: Any) -> bytes:
    words: bytes = state["key"].astype("uint32").tobytes()
    return words + int(state["pos"]).to_bytes(4, sys.byteorder)


def _mt19937_words(generator: Any) -> memoryview | None:
    """Return where the state of an MT19937 generator lies; `None` for another one, or an unknown layout."""
    if type(generator).__name__ != "MT19937":
        return None
    held = _memory(int(generator.ctypes.state_address))
    expected = _words_of(generator.state["state"])
    return held if bytes(held) == expected else None


class HostStreams:
    """torch's CPU generator, NumPy's and Python's global streams together; about 6 us to save and put back."""

    def __init__(self) -> None:
        self._numpy_stream = NumpyStream()
        self.all: tuple[HostStream, ...] = (TorchStream(), PythonStream(), self._numpy_stream)

    def forget(self) -> None:
        """Make no assumption about the streams at the next `save`; call after setting them by other means."""
        self._numpy_stream.forget()

    def seed(self, seed: int) -> None:
        """Seed the streams in about 9 us.

        Args:
            seed: An integer of 63 bits; NumPy takes the lower 32.
        """
        for stream in self.all:
            stream.seed(seed)

    def save(self) -> tuple[Any, ...]:
        """Return the streams' state; to be given back to `put_back` as it is."""
        return tuple([stream.save() for stream in self.all])

    def put_back(self, state: tuple[object, ...]) -> None:
        """Put the streams back into a saved state."""
        for stream, saved in zip(self.all, state, strict=True):
            stream.put_back(saved)


HOST_STREAMS = HostStreams()
"""The one of this process: the streams are global, so there is nothing to have two of."""
