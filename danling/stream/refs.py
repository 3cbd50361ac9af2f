"""What a log says of a sample: its id, where its features are, and their shapes and dtypes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from danling.utils.plain import parse_json


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Args:
        shape: Its sizes.
        dtype: The name of its dtype as torch has it, such as `bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(
                f"Expected the name of a dtype of torch, such as 'float32'. Received: {self.dtype!r}."
            )
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"Expected sizes of at least 0. Received: {shape}.")
        # A frozen dataclass can be set in no other way.
        object.__setattr__(self, "shape", shape)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return shape and dtype of a tensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class SampleRef:
    """One sample of a stream: what it is, and where its features are.

    Args:
        id: Names the sample in the log, which holds each at most once: a producer that is started again leaves out the ids that are there.
        object_id: Names the features in the store. No two objects of a store ever have the same.
        tensors: Shape and dtype of each feature by name.
        meta: What else is known of the sample, as JSON: the version of the weights that made it, its source. It is copied, and is at once
            what a log in a file gives back: a tuple becomes a list, and keys become strings.

    Raises:
        TypeError: If an id is no string, or `meta` has a value that JSON lacks, such as a tensor or a NaN.
    """

    id: str
    object_id: str
    tensors: Mapping[str, TensorSpec]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not isinstance(self.object_id, str):
            raise TypeError(
                f"Expected strings as the ids of a sample and of its object. Received: {self.id!r}, {self.object_id!r}."
            )
        try:
            meta = json.loads(json.dumps(dict(self.meta), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Expected plain JSON in the metadata of sample {self.id!r}: the log of a stream has no tensors, and no NaN or infinity. "
                f"Received: {error}. Return tensors as features, which go to the store, and None for a number that is none."
            ) from None
        object.__setattr__(self, "meta", meta)

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def to_json(self, place: int | None = None) -> str:
        """Return the reference as one line of JSON, which ends with its checksum.

        Args:
            place: The place of the sample in the log that the line is for.
        """
        tensors = {name: [list(spec.shape), spec.dtype] for name, spec in self.tensors.items()}
        plain: dict[str, Any] = {
            "id": self.id,
            "object": self.object_id,
            "tensors": tensors,
            "meta": dict(self.meta),
        }
        if place is not None:
            plain["place"] = place
        line = to_checked_json(plain)
        if len(line) >= LONGEST_LINE:
            raise ValueError(
                f"Expected the reference of a sample in fewer than {LONGEST_LINE:,} characters. Received: sample {self.id[:80]!r} with "
                f"{len(line):,}. Put large values into the features, which go to the store."
            )
        return line

    @classmethod
    def from_json(cls, line: str | bytes, place: int | None = None) -> SampleRef:
        """Return the reference that `to_json` wrote; one without a checksum, as earlier versions wrote it, is read too.

        Args:
            line: The line.
            place: The place in the log at which it was found; `None` leaves that unchecked.

        Raises:
            ValueError: If the line is no reference, is damaged, or belongs to another place.
        """
        try:
            plain = parse_checked_json(line, _REFERENCE)
            if place is not None and plain.get("place", place) != place:
                raise ValueError(
                    f"it belongs to place {plain['place']}, so that lines of the log are missing or repeated"
                )
            tensors = {
                name: TensorSpec(tuple(shape), dtype)
                for name, (shape, dtype) in plain["tensors"].items()
            }
            return cls(plain["id"], plain["object"], tensors, plain["meta"])
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"Expected the reference of a sample as one line of JSON. Received: {line[:200]!r} ({error})."
            ) from None


_REFERENCE = ({"id", "object", "tensors", "meta"},)
_CHECKSUM = b',"crc32":"'
_CHECKSUM_BYTES = len(_CHECKSUM) + 8 + len(b'"}')


def to_checked_json(plain: Mapping[str, Any]) -> str:
    """Return a mapping as one line of JSON, with the CRC-32 of what is before it as the last entry."""
    # Without the closing brace, so that the checksum becomes the last entry.
    body = json.dumps(plain, separators=(",", ":"), allow_nan=False)[:-1]
    return f'{body}{_CHECKSUM.decode()}{crc32(body.encode()):08x}"}}'


def has_checksum(line: str | bytes) -> bool:
    """Return whether a line is one of `to_checked_json`.

    Raises:
        ValueError: If its checksum is not that of the line.
    """
    text = (line.encode() if isinstance(line, str) else line).rstrip(b"\n")
    end = text[-_CHECKSUM_BYTES:]
    if not (end.startswith(_CHECKSUM) and end.endswith(b'"}')):
        return False
    found = b"%08x" % crc32(text[:-_CHECKSUM_BYTES])
    written = end[len(_CHECKSUM) : -2]
    if found != written:
        raise ValueError(
            f"the checksum of the line is {found.decode()}, and {written!r} was written with it"
        )
    return True


def parse_checked_json(line: str | bytes, kinds: Sequence[set[str]]) -> dict[str, Any]:
    """Return the mapping of a line of `to_checked_json`, or of a line without a checksum, as earlier versions wrote it.

    Args:
        line: The line.
        kinds: The entries that a line without a checksum may have: one with others has lost its checksum to damage.

    Raises:
        ValueError: If the line is damaged, or no mapping.
    """
    is_checked = has_checksum(line)
    plain = parse_json(line)
    if not isinstance(plain, dict) or not (is_checked or plain.keys() in kinds):
        raise ValueError("it has no checksum, and other entries than a line without one")
    return plain


LONGEST_LINE = 16 << 20
"""Bytes of the longest line of a log that is written or read."""
ROOM = "Free space there, or let the producer be ahead by fewer samples"
"""Advice on a full disk."""
