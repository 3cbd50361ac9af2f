"""From features to the log: what is checked before they are stored, and how far a producer may be ahead."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from .protocols import FeatureStore, RefChannel
from .refs import SampleRef, TensorSpec

Progress = Literal["made", "waits", "done"]

_POLL_SECONDS = (0.001, 0.05)
"""The first and the longest pause between two looks at the credit."""

_ALLOWED = "max_in_flight"
"""What a producer that is limited adds to the metadata of each sample."""

_MOST_NAMES = 8
"""Objects with other bits of one sample that are met at most: each is left by a kill between store and log, or of a second process."""


@dataclass(frozen=True)
class Captured:
    """The features of one sample on their way to the store.

    Attributes:
        id: Names the sample in the log.
        features: Its features by name.
        meta: What else is known of it, as JSON.
    """

    id: str
    features: Mapping[str, Tensor]
    meta: Mapping[str, Any]


def by_sample(features: object, ids: Sequence[str]) -> list[Mapping[str, Tensor]]:
    """Return what `capture` returned, a mapping for each sample."""
    if isinstance(features, Mapping):
        for name, tensor in features.items():
            _check_tensor(name, tensor, ids[0])
            if tensor.ndim == 0 or len(tensor) != len(ids):
                raise ValueError(
                    f"Expected feature {name!r} with the {len(ids)} samples of the batch along its first dimension. Received: shape "
                    f"{tuple(tensor.shape)} for the batch that begins with sample {ids[0]!r}. Return one row for each sample, or a list "
                    "with a mapping for each."
                )
        return [{name: tensor[row] for name, tensor in features.items()} for row in range(len(ids))]
    if isinstance(features, Sequence) and len(features) == len(ids) and all(isinstance(f, Mapping) for f in features):
        for row, sample in zip(features, ids, strict=True):
            for name, tensor in row.items():
                _check_tensor(name, tensor, sample)
        return list(features)
    received = f"{len(features)} items" if isinstance(features, Sequence) else type(features).__name__
    raise ValueError(
        f"Expected `capture` to return tensors by name, or a list with such a mapping for each of {len(ids)} samples. Received: {received} "
        f"for the batch that begins with sample {ids[0]!r}."
    )


def _check_tensor(name: object, tensor: object, sample: str) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ValueError(
            f"Expected features of sample {sample!r} to be tensors by name. Received: {name!r}: {type(tensor).__name__}. Return plain "
            "values from `metadata`."
        )
    if tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"Expected features of sample {sample!r} to be dense tensors with values. Received: {name!r}: a "
            f"{'nested' if tensor.is_nested else 'meta'} tensor. Return a list with a mapping for each sample where their lengths differ."
        )
    if hasattr(tensor, "full_tensor"):
        raise ValueError(
            f"Expected whole features of sample {sample!r}. Received: {name!r}: a {type(tensor).__name__}, of which ranks hold parts. "
            "Return its full_tensor() from `capture`."
        )


def check_like(sample: str, specs: Mapping[str, TensorSpec], first: Mapping[str, TensorSpec]) -> None:
    """Refuse features that those of the first sample of the log cannot stand in one batch with.

    Names, dtypes and numbers of dimensions are the same in all samples, and so is the last dimension, the width of a state. Other
    dimensions, such as the length of a sequence, may differ; so may the only dimension of integers, and of what is as long as another
    feature of the first sample, such as a mask over its tokens.
    """
    for name in sorted({**specs, **first}):
        one, other = specs.get(name), first.get(name)
        if one is None or other is None:
            received = f"none (it has {', '.join(specs)})" if one is None else f"{name!r} beside {', '.join(first)}"
            raise _differs(sample, f"{'a' if one is None else 'no'} feature {name!r}", received)
        if one.dtype != other.dtype:
            raise _differs(sample, f"dtype {other.dtype} of feature {name!r}", one.dtype)
        if len(one.shape) != len(other.shape):
            raise _differs(sample, f"{len(other.shape)} dimensions of feature {name!r}", f"shape {one.shape}")
        if one.shape and one.shape[-1] != other.shape[-1] and _has_width(name, first):
            raise _differs(sample, f"width {other.shape[-1]} of feature {name!r}", f"shape {one.shape}")


def _has_width(name: str, first: Mapping[str, TensorSpec]) -> bool:
    spec = first[name]
    if len(spec.shape) > 1:
        return True
    is_length = any(len(other.shape) > 1 and other.shape[0] == spec.shape[0] for other in first.values())
    return spec.torch_dtype.is_floating_point and not is_length


def _differs(sample: str, expected: str, received: object) -> ValueError:
    return ValueError(
        f"Expected {expected} in sample {sample!r}, as in the first sample of the log. Received: {received}. Nothing of it was stored: "
        "mend `capture` and start the producer again, which goes on here."
    )


class Publisher:
    """Puts features into a store and their references into the log, as far as the credit goes."""

    def __init__(self, store: FeatureStore, channel: RefChannel, *, max_in_flight: int | None, part: int = 0) -> None:
        self._store = store
        self._channel = channel
        self._max_in_flight = max_in_flight
        self._part = part
        self._first: Mapping[str, TensorSpec] | None = None

    def credit(self) -> int | None:
        """Return how many samples may be published now; `None` for any number. It is read from the log, whoever published before."""
        if self._max_in_flight is None:
            return None
        return max(self._max_in_flight - (self._channel.published() - self._channel.committed()), 0)

    def check(self, samples: Sequence[Captured]) -> list[SampleRef]:
        """Return the references of samples, once all of them are as the log has them."""
        refs = []
        for sample in samples:
            if _ALLOWED in sample.meta or not sample.features:
                received = f"metadata with {_ALLOWED!r}, which the log keeps" if sample.features else "none"
                raise ValueError(
                    f"Expected features of sample {sample.id!r}, and metadata by names of its own. Received: {received}. Nothing of it was "
                    "stored: mend `capture` or `metadata` and start the producer again, which goes on here."
                )
            specs = {name: TensorSpec.of(tensor) for name, tensor in sample.features.items()}
            if self._first is None:
                before = self._channel.read(0, 1)
                self._first = before[0].tensors if before else specs
            check_like(sample.id, specs, self._first)
            allowed = {} if self._max_in_flight is None else {_ALLOWED: self._max_in_flight}
            refs.append(SampleRef(sample.id, self._object_id(sample.id), specs, {**sample.meta, **allowed}))
        return refs

    def publish(self, refs: Sequence[SampleRef], samples: Sequence[Captured], *, since: int = 0) -> int:
        """Store samples and append them to the log; return how many of them were new there."""
        # Another producer, or another rank of this one, may have published some of them since they were found to be new.
        new = [pair for pair in zip(refs, samples, strict=True) if not self._channel.holds(pair[0].id)]
        stored = self._store_many(new)
        appended = self._channel.append([ref for ref, _ in stored])
        if appended < len(stored) or any(others for _, others in stored):
            # Now that the samples are in the log, objects of theirs that it does not lead to are needed by nobody; before, any might be.
            led_to = {ref.object_id for ref in self._channel.read(since, self._channel.published())}
            names = (name for ref, others in stored for name in (ref.object_id, *others))
            self._store.discard(name for name in names if name not in led_to)
        return appended

    def _store_many(self, new: Sequence[tuple[SampleRef, Captured]]) -> list[tuple[SampleRef, list[str]]]:
        try:
            self._store.put_many({ref.object_id: sample.features for ref, sample in new})
            return [(ref, []) for ref, _ in new]
        except (BufferError, TypeError, ValueError):
            # One by one, which says of each sample what is wrong, finds other names, and passes over those that are stored.
            return [self._put(ref, sample.features) for ref, sample in new]

    def _put(self, ref: SampleRef, features: Mapping[str, Tensor]) -> tuple[SampleRef, list[str]]:
        """Store a sample; return its reference, and the names of objects that hold other bits of it."""
        others: list[str] = []
        while True:
            name = self._object_id(ref.id, len(others))
            try:
                self._store.put(name, features)
                return replace(ref, object_id=name), others
            except ValueError:
                others.append(name)
                if len(others) == _MOST_NAMES:
                    raise
            except TypeError as error:
                raise TypeError(f"{error} It holds sample {ref.id!r}.") from error
            except BufferError:
                if not others:
                    raise
                # Objects that a killed producer has left fill the store: they make room. Should a second producer of this part live, its
                # sample may be lost with them, and reading names it then.
                self._store.discard(others)
                others.clear()

    def _object_id(self, sample: str, number: int = 0) -> str:
        # The same when the producer is started again, on any number of ranks, so that what it has left behind is found.
        part = f"{self._part}.{number}" if number else self._part
        return hashlib.sha256(f"{self._channel.name}\0{part}\0{sample}".encode()).hexdigest()[:40]


class Production:
    """One pass of a producer, a step at a time."""

    def __init__(self, publisher: Publisher, channel: RefChannel, batches: Iterator[list[Captured]]) -> None:
        self.made = 0
        self.waited = 0.0
        self.repeated = 0
        self.gave_up = False
        self._publisher = publisher
        self._channel = channel
        self._batches = batches
        self._met = 0
        self._committed = 0
        """The watermark as it was before the last attempt to publish: whatever that lacked is there once it has moved."""
        self._since = 0
        self._refs: list[SampleRef] = []
        self._samples: list[Captured] = []

    def meet(self, number: int) -> int:
        """Hear of samples that need not be made, since the log holds them or they stand twice in their batch; return how many are repeated.

        They are counted, and their ids not kept: a pass meets each sample of the log that it has not appended itself at most once, so that
        when it has met more than there are, some came again. Where the log was empty and has no other producer, the first one that comes
        again is known at once; else only once the pass has met as many as others have appended.
        """
        self._met += number
        repeated = max(self._met - (self._channel.published() - self.made), 0)
        self._met -= repeated
        self.repeated += repeated
        return repeated

    def advance(self) -> Progress:
        """Make one batch, or publish as much of the last one as the credit allows; never waits."""
        if not self._samples:
            self._since = self._channel.published()
            samples = next(self._batches, None)
            if samples is None:
                return "done"
            if not samples:
                return "made"
            self._refs, self._samples = self._publisher.check(samples), list(samples)
        self._committed = self._channel.committed()
        credit = self._publisher.credit()
        number = len(self._samples) if credit is None else min(credit, len(self._samples))
        if not number:
            return "waits"
        return self._publish(number)

    def _publish(self, number: int) -> Progress:
        try:
            self.made += self._publisher.publish(self._refs[:number], self._samples[:number], since=self._since)
        except BufferError:
            if number > 1:
                return self._publish(number // 2)
            if self._channel.published() == self._committed:
                raise
            return "waits"
        del self._refs[:number], self._samples[:number]
        return "made"

    def run(
        self,
        *,
        idle_seconds: float,
        stopping: Callable[[], bool],
        made: Callable[[], None],
        leaving: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Make everything, waiting for credit; return whether the pass has come to its end, `False` where it was stopped."""
        while not stopping():
            progress = self.advance()
            if progress == "done":
                return not self.gave_up
            if progress == "made":
                made()
            elif not self._await_credit(idle_seconds, leaving, clock):
                self.gave_up = True
                self._refs, self._samples = [], []
        return False

    def _await_credit(self, idle_seconds: float, leaving: Callable[[], bool], clock: Callable[[], float]) -> bool:
        began, pause, committed = clock(), _POLL_SECONDS[0], self._committed
        try:
            while self._channel.committed() == committed:
                end = self._channel.ended()
                if leaving() or (end is not None and end.kind == "stopped"):
                    return False
                if clock() - began > idle_seconds:
                    raise TimeoutError(
                        f"Expected the trainer of stream {self._channel.name} to give credit back. Received: nothing for {idle_seconds:g} "
                        f"seconds (idle_timeout), with {self._channel.published() - committed} samples in flight. See whether the trainer "
                        "lives and saves checkpoints often enough, or raise max_in_flight; start this producer again, and it goes on here."
                    )
                time.sleep(pause)
                pause = min(pause * 2, _POLL_SECONDS[1])
            return True
        finally:
            self.waited += clock() - began
