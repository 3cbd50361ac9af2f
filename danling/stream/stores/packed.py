"""One object of a stream in one piece of memory: a header that says what it is, and the tensors behind it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from danling.utils.nesting import parse_json

from ..refs import TensorSpec
from .objects import checksum

_MAGIC = b"danling1"
_ALIGNMENT = 64
_NOBODY = "0" * 32
_NO_SUM = "0" * 16


def _header(object_id: str, found: Mapping[str, TensorSpec], writer: str, total: str) -> bytes:
    tensors = [[name, list(spec.shape), spec.dtype] for name, spec in found.items()]
    text = json.dumps({"object": object_id, "tensors": tensors, "writer": writer, "sum": total}).encode()
    start = _MAGIC + len(text).to_bytes(8, "little") + text
    return start.ljust(_aligned(len(start)), b" ")


def header_size(object_id: str, found: Mapping[str, TensorSpec]) -> int:
    """Return the bytes before the first tensor."""
    return len(_header(object_id, found, _NOBODY, _NO_SUM))


def packed_size(object_id: str, found: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of a whole object."""
    return header_size(object_id, found) + sum(_aligned(spec.nbytes) for spec in found.values())


def pack(memory: Tensor, object_id: str, tensors: Mapping[str, Tensor]) -> str:
    """Write an object.

    Args:
        memory: Bytes, as many as `packed_size` says.
        object_id: Its name.
        tensors: Tensors on any device, which are copied once.

    Returns:
        What this writing alone has in its header, to tell it from another of the same object.
    """
    found = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
    places = _places(memory, header_size(object_id, found), found)
    for name, tensor in tensors.items():
        places[name].copy_(tensor)
    writer = uuid.uuid4().hex
    header = _header(object_id, found, writer, checksum(places))
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    return writer


def unpack(memory: Tensor, object_id: str) -> dict[str, Tensor]:
    """Return the tensors of an object, which share its memory.

    Args:
        memory: Its bytes, and maybe more.
        object_id: The name that it should have.

    Raises:
        ValueError: If it is damaged, or is another object.
    """
    about, start = _read_header(memory)
    if about["object"] != object_id:
        raise ValueError(f"object {about['object']!r}")
    found = {name: TensorSpec(tuple(shape), dtype) for name, shape, dtype in about["tensors"]}
    if start + sum(_aligned(spec.nbytes) for spec in found.values()) > memory.numel():
        raise ValueError(f"a damaged object: {memory.numel()} bytes are too few")
    tensors = _places(memory, start, found)
    if about["sum"] != checksum(tensors):
        raise ValueError("a damaged object: the sum of its words is not the one that was written")
    return tensors


def writer_of(memory: Tensor) -> str:
    """Return what `pack` returned for the object in this memory, of which the header is enough.

    Raises:
        ValueError: If there is no object.
    """
    return str(_read_header(memory)[0]["writer"])


def _read_header(memory: Tensor) -> tuple[dict[str, Any], int]:
    start = bytes(memory[:16].tolist())
    length = int.from_bytes(start[8:], "little")
    if not start.startswith(_MAGIC) or 16 + length > memory.numel():
        raise ValueError("a damaged object: it has no header")
    try:
        about = dict(parse_json(bytes(memory[16 : 16 + length].tolist())))
    except ValueError as error:
        raise ValueError(f"a damaged object: {error}") from error
    return about, _aligned(16 + length)


def _places(memory: Tensor, start: int, found: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return the tensors of an object as parts of its memory."""
    places: dict[str, Tensor] = {}
    for name, spec in found.items():
        places[name] = memory[start : start + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
        start += _aligned(spec.nbytes)
    return places


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
