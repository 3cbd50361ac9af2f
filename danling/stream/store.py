"""Where the features of a stream are until a durable checkpoint no longer needs them, and a store in the memory of one process."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .refs import SampleRef, TensorSpec


class FeatureStore(ABC):
    """Immutable objects, each the features of one sample. Safe for several processes where the store outlives one.

    Your own store derives from it, and writes a checksum with each object that `get` verifies.
    """

    @abstractmethod
    def put(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        """Publish an object at once and whole; returns when every reader of the store would see it.

        Args:
            object_id: A name that was never used in this store.
            tensors: The features, on any device.

        Raises:
            ValueError: If the name is taken by other bytes. The same bytes again are no error: a producer that was killed repeats itself.
            BufferError: If the store would exceed its budget of bytes.
            OSError: If it could not be written.
        """

    def put_many(self, objects: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Publish objects, each at once and whole; by default one after the other. Where it raises, some of them may be published.

        Args:
            objects: Features by the name of their object.

        Raises:
            Exception: As `put`.
        """
        for object_id, tensors in objects.items():
            self.put(object_id, tensors)

    @abstractmethod
    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        """Return the features of a sample, bit for bit, in memory that the caller owns, on the CPU.

        Args:
            ref: The sample.

        Raises:
            KeyError: If the object was discarded, or never there.
            ValueError: If the object is damaged, or its names, shapes or dtypes are not those of the reference.
        """

    @abstractmethod
    def discard(self, object_ids: Iterable[str]) -> None:
        """Free objects; those that are gone already are passed over.

        Args:
            object_ids: Their names.
        """

    @abstractmethod
    def usage(self) -> int:
        """Return the bytes of all objects."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files, connections and buffers."""


class CheckedStore(FeatureStore):
    """A store of the library: it reads objects as its logs describe them, and refuses other bytes under a name that is taken."""

    @abstractmethod
    def _place(self, object_id: str) -> str:
        """Return what messages call the place of an object."""

    @abstractmethod
    def _load(self, object_id: str, expected: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """Return the tensors of an object in memory that the caller owns.

        Raises:
            KeyError: If it is not there.
            ValueError: If it is damaged.
        """

    def get(self, ref: SampleRef) -> dict[str, Tensor]:
        place = self._place(ref.object_id)
        try:
            found = self._load(ref.object_id, ref.tensors)
        except KeyError:
            raise KeyError(
                f"Expected the features of sample {ref.id!r} in {place}. Received: no object {ref.object_id!r}; "
                "it was discarded after a commit, or never put there. Begin from the latest checkpoint of the run that owns the stream."
            ) from None
        except ValueError as error:
            raise ValueError(
                f"Expected the features of sample {ref.id!r} in {place}. Received: {error}. Bring them back from a copy, or make the "
                "features again in another stream: this log counts the sample as made."
            ) from error
        there = specs_of(found)
        expected = dict(ref.tensors)
        if there != expected:
            name = min(
                name for name in {**expected, **there} if expected.get(name) != there.get(name)
            )
            raise ValueError(
                f"Expected {describe(expected.get(name))} as feature {name!r} of sample {ref.id!r}, as its reference in the log says. "
                f"Received: {describe(there.get(name))} in {place}. Read the log with the store that its producer wrote to."
            )
        return {name: found[name] for name in expected}

    def _check_same(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        """Check that the object that has this name has these bits; a NaN equals itself here."""
        place = self._place(object_id)
        try:
            found = self._load(object_id, specs_of(tensors))
        except KeyError:
            return  # discarded by a trainer that needed it no more
        except ValueError as error:
            raise ValueError(
                f"Expected object {object_id!r} in {place}. Received: {error}. Discard the object, and put it again."
            ) from error
        if specs_of(found) != specs_of(tensors) or any(
            not torch.equal(as_bytes(found[name]), as_bytes(tensor))
            for name, tensor in tensors.items()
        ):
            raise ValueError(
                f"Expected a name that no object of {place} has, since objects never change. Received: {object_id!r}, which holds other "
                "bytes. Give each object its own name, for instance with the version of the weights that made it."
            )


class MemoryStore(CheckedStore):
    """A store for a producer and a trainer in one process, interleaved or in threads.

    Args:
        max_bytes: Bytes of features that it holds at most, no limit where it is left out.
    """

    def __init__(self, *, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.RLock()
        self._objects: dict[str, tuple[dict[str, Tensor], str]] = {}
        """Tensors and checksum by name of the object."""
        self._usage = 0
        self._pid = os.getpid()

    def put(self, object_id: str, tensors: Mapping[str, Tensor]) -> None:
        # Before the lock is taken: the copy may wait for a device.
        copy = owned(dense(object_id, tensors))
        written = checksum(object_id, copy)
        with self._locked():
            if object_id in self._objects:
                self._check_same(object_id, copy)
                return
            size = _nbytes(copy)
            check_budget(object_id, size, self._usage, self.max_bytes)
            self._objects[object_id] = copy, written
            self._usage += size

    def _place(self, object_id: str) -> str:
        return "the store in memory"

    def _load(self, object_id: str, expected: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        with self._locked():
            found, written = self._objects[object_id]
        tensors = owned(found)
        check_sum(object_id, tensors, written)
        return tensors

    def discard(self, object_ids: Iterable[str]) -> None:
        with self._locked():
            for object_id in object_ids:
                self._usage -= _nbytes(self._objects.pop(object_id, ({}, ""))[0])

    def usage(self) -> int:
        with self._locked():
            return self._usage

    def close(self) -> None:
        """Do nothing: the objects stay for other users of the store."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"Expected a MemoryStore to be used in the process that made it ({self._pid}). Received: process {os.getpid()}, "
                "which would see a copy. Use a DirectoryStore between processes, such as the workers of a loader."
            )
        with self._lock:
            yield


# What stores do with the tensors of an object


def check_tensors(owner: str, tensors: Mapping[Any, Any]) -> None:
    """Check that features are tensors by name, dense, and whole in this process."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
        elif tensor.is_meta:
            kind = "a meta tensor"
        elif tensor.is_nested or tensor.layout is not torch.strided:
            kind = f"a {'nested' if tensor.is_nested else tensor.layout} tensor"
        elif hasattr(tensor, "full_tensor"):
            kind = f"a {type(tensor).__name__}, of which ranks hold parts"
        else:
            continue
        raise TypeError(
            f"Expected dense, whole tensors by name in {owner}. Received: {name!r}: {kind}. Return plain values from `metadata`, the "
            "full_tensor() of a divided one, and where lengths differ a list with a mapping for each sample."
        )


def dense(object_id: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an object, contiguous and on the CPU; those that are so already are not copied."""
    check_tensors(f"object {object_id!r}", tensors)
    return {
        # What torch conjugates or negates only when it is read would be stored without that.
        name: tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        for name, tensor in tensors.items()
    }


def owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, bit for bit, in separate memory."""
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return shapes and dtypes by name."""
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, which share its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def checksum(object_id: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of the name of an object, and of the name, dtype, shape and bytes of each contiguous tensor, sorted by name.

    It finds every change within 32 bits in a row and any two flipped bits in up to 512 MiB, and misses other damage once in 2**32 cases.
    It does not protect against deliberate changes.
    """
    names = sorted(tensors)
    about = json.dumps(
        [object_id, [[name, str(tensors[name].dtype), [*tensors[name].shape]] for name in names]]
    )
    code = zlib.crc32(about.encode())
    for name in names:
        tensor = tensors[name]
        if tensor.nbytes:
            # The memory itself: NumPy, which would show it too, need not be installed.
            code = zlib.crc32(
                (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()), code
            )
    return f"{code:08x}"


def check_sum(object_id: str, tensors: Mapping[str, Tensor], written: object) -> None:
    """Check tensors that were read against the checksum that was written with them."""
    if checksum(object_id, tensors) != written:
        raise ValueError("a damaged object: its checksum is not the one that was written")


def describe(spec: TensorSpec | None) -> str:
    """Return what messages call a feature."""
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def check_budget(object_id: str, size: int, usage: int, max_bytes: int | None) -> None:
    """Check that an object fits into a store."""
    if max_bytes is not None and usage + size > max_bytes:
        raise BufferError(
            f"Expected at most {max_bytes} bytes in the store (max_bytes). Received: object {object_id!r} of {size} bytes in addition to "
            f"{usage} that are in use. Raise max_bytes, or lower the number of samples that the producer may be ahead."
        )
