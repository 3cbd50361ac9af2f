"""What is seen of the forwards and backwards of an update, so that they can be made again and compared."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attempts import GRADIENT
from .hashing import Hasher, key_of
from .held import read_digests
from .kept_batches import copied, digest_of, memory_of

logger = logging.getLogger("danling")

Seen = dict[tuple[int, str], "Tensor | int"]
"""Digests by stage and name: 0-dim int64, or integers."""

_STAGES = 10
"""Stages of a micro-batch: its batch, the batch after it, its loss."""


class Window(Protocol):
    """The open window; see `danling.training.Window`."""

    weight: float | Tensor
    loss: float | Tensor
    samples: float
    nonfinite: float | Tensor
    reduces: bool


@dataclass
class _Kept:
    """A batch as it arrived.

    Attributes:
        batch: A copy.
        digests: What it was, by path.
        memory: Where its tensors lay.
    """

    batch: Any
    digests: dict[str, int]
    memory: set[int]


@dataclass
class _Attempt:
    """One attempt at the micro-batches of an update.

    Attributes:
        is_first: Whether the batches are those of the loader.
        seen: What was seen.
        count: Micro-batches made.
        data: The open one on the device.
    """

    is_first: bool
    seen: Seen = field(default_factory=dict)
    count: int = 0
    data: object = None


class Witness:
    """Keeps copies of the batches of an update, and notes what each attempt at its forwards and backwards comes to. No communication.

    Args:
        window: The window.
        unreduced: Returns the parameters by name whose gradients the backward of the last micro-batch reduces over the ranks, and which
            can be looked at before.
        device: Where losses live.
    """

    def __init__(
        self,
        window: Window,
        *,
        unreduced: Callable[[], Iterable[tuple[str, nn.Parameter]]],
        device: torch.device,
    ) -> None:
        self._window = window
        self._unreduced = unreduced
        self._hasher = Hasher(device)
        self._kept: list[_Kept] = []
        self._attempt: _Attempt | None = None
        self._has_warned = False

    # One update

    def open(self) -> None:
        """Begin an update."""
        self._kept = []
        self._attempt = _Attempt(is_first=True)

    def open_again(self) -> None:
        """Begin another attempt at the same update."""
        self._attempt = _Attempt(is_first=False)

    def close(self) -> None:
        """Stop looking, and drop the copies."""
        self._kept = []
        self._attempt = None

    def keeping(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as they come, of which copies are kept.

        Args:
            batches: Named tuples with an entry `data`.
        """
        for batch in batches:
            if self._attempt is not None:
                kept = batch._replace(data=copied(batch.data))
                self._kept.append(_Kept(kept, self._digests(batch.data), memory_of(batch.data)))
            yield batch

    def copies(self) -> Iterator[Any]:
        """Yield copies of the batches that were kept, another one for each attempt, since a step may write to it."""
        for kept in list(self._kept):
            yield kept.batch._replace(data=copied(kept.batch.data))

    @property
    def is_repeating(self) -> bool:
        """Whether the batches are those that have been seen before."""
        return self._attempt is not None and not self._attempt.is_first

    def seen(self) -> Seen:
        """Return what was seen of the present attempt."""
        assert self._attempt is not None
        return self._attempt.seen

    # One micro-batch

    def run(self, batch: Any, run: Callable[[Any], None]) -> None:
        """Run a micro-batch and note what it comes to, within an attempt; else just run it.

        Args:
            batch: The batch.
            run: Runs it.
        """
        attempt = self._attempt
        if attempt is None or attempt.count == len(self._kept):
            run(batch)
            return
        kept, stage, name = self._kept[attempt.count], _STAGES * (attempt.count + 1), f"micro-batch {attempt.count + 1}"
        self._begin(attempt, kept, batch, stage, name)
        with self._looking_at_gradients(attempt.seen):
            run(batch)
        attempt.seen[stage + 2, f"the batch of {name} after its backward"] = self._sum(attempt.data)
        window = self._window
        values = (window.loss, window.weight, window.samples, window.nonfinite)
        attempt.seen.update(
            ((stage + 4, f"the {what} up to {name}"), bits_of(value))
            for what, value in zip(("loss", "weight", "samples", "loss that is not finite"), values)
        )
        attempt.count += 1
        attempt.data = None

    def saw(self, data: object) -> None:
        """Take in the open micro-batch on the device.

        Args:
            data: The batch.
        """
        if self._attempt is not None:
            self._attempt.data = data

    def _begin(self, attempt: _Attempt, kept: _Kept, batch: Any, stage: int, name: str) -> None:
        digests = self._digests(batch.data)
        if attempt.is_first and digests != kept.digests and self._is_overwritten(kept):
            kept.batch, kept.digests = batch._replace(data=copied(batch.data)), digests
        attempt.seen[stage + 1, f"the batch of {name}"] = key_of(*sorted(digests.items()))

    def _is_overwritten(self, kept: _Kept) -> bool:
        """Whether a later batch lies in the memory of this one, which the program then trains on instead."""
        later = self._kept[self._kept.index(kept) + 1 :]
        found = any(other.memory & kept.memory for other in later)
        if found and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The loader writes a batch into the memory of the one before, which has not been trained on yet, and never is. Return new "
                "tensors from collate_fn, or a clone of them."
            )
        return found

    @contextmanager
    def _looking_at_gradients(self, seen: Seen) -> Iterator[None]:
        """Note the gradients of the last backward of a window before they are reduced."""
        if not self._window.reduces:
            yield
            return

        def look(name: str) -> Callable[[Tensor], None]:
            def note(parameter: Tensor) -> None:
                if parameter.grad is not None:
                    seen[GRADIENT, f"the gradient of {name!r}"] = self._hasher.digest_held(parameter.grad)

            return note

        hooks = [
            parameter.register_post_accumulate_grad_hook(look(name))  # type: ignore[no-untyped-call]
            for name, parameter in self._unreduced()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _digests(self, data: object) -> dict[str, int]:
        found = dict(digest_of(data, self._hasher))
        tensors = {name: digest for name, digest in found.items() if isinstance(digest, Tensor)}
        return {name: digest for name, digest in found.items() if isinstance(digest, int)} | read_digests(tensors)

    def _sum(self, data: object) -> int:
        return key_of(*(f"{name}={digest}" for name, digest in self._digests(data).items()))


def bits_of(value: float | Tensor) -> Tensor | int:
    """Return the bits of a number of 64 bits, as an integer or 0-dim int64."""
    if isinstance(value, Tensor):
        return value.detach().double().reshape(()).view(torch.int64)
    return int(struct.unpack("<q", struct.pack("<d", float(value)))[0])
