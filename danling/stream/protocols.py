"""What a stream is made of: a store of features, and a log that says in which order they are trained on."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
            raise ValueError(f"Expected the name of a dtype of torch, such as 'float32'. Received: {self.dtype!r}.")
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"Expected sizes of at least 0. Received: {shape}.")
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


def check_id(sample: str) -> None:
    """Check that the id of a sample can be written into a log."""
    try:
        sample.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"Expected an id of valid Unicode for a sample. Received: {sample!r} ({error.reason}). Name files otherwise, such as by "
            "os.fsencode(name).hex()."
        ) from None


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
                f"Expected plain JSON in the metadata of sample {self.id!r}: the log of a stream holds no tensors, and no NaN or infinity. "
                f"Received: {error}. Return tensors as features, which go to the store, and None for a number that is none."
            ) from None
        object.__setattr__(self, "meta", meta)

    @property
    def nbytes(self) -> int:
        """Bytes of the features."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def to_json(self) -> str:
        """Return the reference as one line of JSON."""
        tensors = {name: [list(spec.shape), spec.dtype] for name, spec in self.tensors.items()}
        plain = {"id": self.id, "object": self.object_id, "tensors": tensors, "meta": dict(self.meta)}
        return json.dumps(plain, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> SampleRef:
        """Return the reference that `to_json` wrote.

        Raises:
            ValueError: If the line is no reference.
        """
        try:
            plain = parse_json(line)
            tensors = {name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in plain["tensors"].items()}
            return cls(plain["id"], plain["object"], tensors, plain["meta"])
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"Expected the reference of a sample as one line of JSON. Received: {line[:200]!r} ({error})."
            ) from None


ROOM = "Free space there, or let the producer be ahead by fewer samples"
"""Advice on a full disk."""


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


@dataclass(frozen=True)
class StreamEnd:
    """How the log of a stream ended.

    Args:
        kind: `complete` after the last sample, `failed` by an error of the producer, `stopped` on request.
        published: Samples in the log.
        reason: The error, or who stopped it.
    """

    kind: str
    published: int
    reason: str = ""


class RefChannel(Protocol):
    """A log of samples in one order, each once, with the watermark up to which they are no longer needed."""

    @property
    def name(self) -> str:
        """What messages call the channel: its path, for instance."""

    def append(self, refs: Sequence[SampleRef]) -> int:
        """Append those that are not in the log, durably, and return how many these were.

        Args:
            refs: Samples in their order.

        Raises:
            RuntimeError: If the log has ended.
        """

    def read(self, start: int, stop: int) -> list[SampleRef]:
        """Return the samples at the places `start` to `stop`, fewer where the log holds fewer.

        Args:
            start: The first place.
            stop: The place after the last.
        """

    def holds(self, sample_id: str) -> bool:
        """Return whether a sample is in the log."""

    def published(self) -> int:
        """Return the number of samples in the log, those of other processes included."""

    def committed(self) -> int:
        """Return the watermark: samples that a durable checkpoint of the trainer is behind."""

    def commit(self, position: int) -> None:
        """Move the watermark; it never goes back.

        Args:
            position: Samples from the beginning of the log.

        Raises:
            ValueError: If the log holds fewer.
        """

    def ended(self) -> StreamEnd | None:
        """Return how the log ended, `None` while it is open."""

    def end(self, kind: str = "complete", reason: str = "", *, part: int = 0, parts: int = 1) -> None:
        """End the log; one that has ended keeps its first end, which is the cause of the later ones.

        Args:
            kind: `complete`, `failed` or `stopped`. One that failed or was stopped goes on when a producer calls `reopen`.
            reason: The error, or who stopped it.
            part: Which of several producers ends, from 0. The log is complete when each of them has said so once, in whichever process; one
                that fails or stops ends it at once.
            parts: Number of producers that append to the log.

        Raises:
            ValueError: If the kind is none of them, or the producers do not agree about their number.
        """

    def reopen(self) -> None:
        """Go on after a failure or a stop, repairing what a killed producer left. One that is complete stays so."""

    def claim(self, run: str) -> bool:
        """Take the log for one trainer, and return whether it may move the watermark and discard features.

        The claim ends with the process, the ownership with the log. A process that gets False may
        read a complete log too, but moves and frees nothing.

        Args:
            run: The lineage of the run, which alone goes on with this log while it is not complete.

        Raises:
            RuntimeError: If the log is not complete, and another trainer reads it now or it belongs to another run.
        """

    def close(self) -> None:
        """Let go of files and connections, and of the claim."""
