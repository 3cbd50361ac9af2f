"""What every store does with the tensors of an object: check them, own them, compare them."""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..protocols import SampleRef, TensorSpec


def check_object(object_id: str, tensors: Mapping[str, Tensor]) -> None:
    """Check the name of an object, and that it consists of dense tensors."""
    if not isinstance(object_id, str):
        raise TypeError(f"Expected the name of an object as a string. Received: {type(object_id).__name__}.")
    if not object_id:
        raise ValueError("Expected an object with a name that no other object of the store has. Received: ''.")
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and hasattr(tensor, "full_tensor"):
            raise TypeError(
                f"Expected whole tensors in object {object_id!r}. Received: {name!r}: a {type(tensor).__name__}, of which ranks hold "
                "parts. Return its full_tensor() from capture."
            )
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            kind = f"{tensor.layout} tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(
                f"Expected dense tensors by name in object {object_id!r}. Received: {name!r}: {kind}. "
                "Return tensors from capture, and put other values into the metadata of the sample."
            )


def dense(object_id: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an object, contiguous and on the CPU; those that are so already are not copied."""
    check_object(object_id, tensors)
    return {name: tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}


def owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, bit for bit, in separate memory."""
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def specs(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Return shapes and dtypes by name."""
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the values of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, which share its memory."""
    return tensor.reshape(-1).view(torch.uint8)


def same_bytes(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two objects hold the same names, shapes, dtypes and bits; a NaN equals itself here."""
    return specs(one) == specs(other) and all(torch.equal(as_bytes(one[name]), as_bytes(other[name])) for name in one)


def checksum(object_id: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of the name of an object, and of the name, dtype, shape and bytes of each contiguous tensor, sorted by name.

    It finds every change within 32 bits in a row and any two flipped bits in up to 512 MiB, and misses other damage once in 2**32 cases.
    It does not protect against deliberate changes.
    """
    names = sorted(tensors)
    about = json.dumps([object_id, [[name, str(tensors[name].dtype), [*tensors[name].shape]] for name in names]])
    code = zlib.crc32(about.encode())
    for name in names:
        tensor = tensors[name]
        if tensor.nbytes:
            # The memory itself: NumPy, which would show it too, need not be installed.
            code = zlib.crc32((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()), code)
    return f"{code:08x}"


def check_sum(object_id: str, tensors: Mapping[str, Tensor], written: object) -> None:
    """Check tensors that were read against the checksum that was written with them."""
    if checksum(object_id, tensors) != written:
        raise ValueError("a damaged object: its checksum is not the one that was written")


def check_against(ref: SampleRef, found: Mapping[str, TensorSpec], place: str) -> None:
    """Check that an object is what the log says of it."""
    expected = dict(ref.tensors)
    if expected == dict(found):
        return
    differing = sorted({name for name in {**expected, **found} if expected.get(name) != found.get(name)})
    name = differing[0]
    raise ValueError(
        f"Expected {_describe(expected.get(name))} as feature {name!r} of sample {ref.id!r}, as its reference in the log says. "
        f"Received: {_describe(found.get(name))} in {place}. Read the log with the store that its producer wrote to."
    )


def _describe(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype}{list(spec.shape)}"


def check_budget(object_id: str, size: int, usage: int, max_bytes: int | None) -> None:
    """Check that an object fits into a store."""
    if max_bytes is not None and usage + size > max_bytes:
        raise BufferError(
            f"Expected at most {max_bytes} bytes in the store (max_bytes). Received: object {object_id!r} of {size} bytes in addition to "
            f"{usage} that are in use. Raise max_bytes, or lower the number of samples that the producer may be ahead."
        )


def missing(ref: SampleRef, place: str) -> KeyError:
    """Return the error for an object that is not there."""
    return KeyError(
        f"Expected the features of sample {ref.id!r} in {place}. Received: no object {ref.object_id!r}; "
        "it was discarded after a commit, or never put there. Begin from the latest checkpoint of the run that owns the stream."
    )


def damaged(ref: SampleRef, place: str, error: ValueError) -> ValueError:
    """Return the error for an object whose bytes are not those that were written."""
    return ValueError(
        f"Expected the features of sample {ref.id!r} in {place}. Received: {error}. "
        "Make the features anew in another stream: this log counts the sample as made."
    )


def taken(object_id: str, place: str) -> ValueError:
    """Return the error for a name that another object has."""
    return ValueError(
        f"Expected a name that no object of {place} has, since objects never change. Received: {object_id!r}, which holds other bytes. "
        "Give each object its own name, for instance with the version of the weights that made it."
    )
