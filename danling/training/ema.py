"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.utils.tensors import canonical_name, local_part


class EMA:
    """A moving average of parameters and floating buffers, kept shard by shard next to the model.

    Integer buffers, such as BatchNorm's counter, are copied. The average lives on the parameters' own devices and layouts,
    so it works on sharded models, where a deep copy would not.

    Args:
        model: The bare model (not wrapped in DDP).
        decay: Weight of the past, in [0, 1).
        warmup: Ramp the decay as `min(decay, (1 + n) / (10 + n))` after `n` updates, as TensorFlow's
            `ExponentialMovingAverage(num_updates=...)` does, so that early weights are forgotten.
        interval: Average once in so many committed updates.

    Raises:
        ValueError: If `decay` or `interval` is out of range.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999, warmup: bool = False, interval: int = 1) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"Expected 0 <= ema.decay < 1. Received: ema.decay={decay!r}.")
        if interval < 1:
            raise ValueError(f"Expected ema.interval >= 1. Received: ema.interval={interval!r}.")
        self.decay = decay
        self.warmup = warmup
        self.interval = interval
        self.num_updates = 0
        saved = model.state_dict(keep_vars=True)
        named = [*model.named_parameters(), *(pair for pair in model.named_buffers() if pair[0] in saved)]
        self._live = {canonical_name(name): tensor for name, tensor in named}
        self.weights = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Begin the average anew at the current weights."""
        self.num_updates = 0
        for name, live in self._live.items():
            self.weights[name].copy_(live)

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average; called once for a committed update."""
        self.num_updates += 1
        if self.num_updates % self.interval:
            return
        averages: list[Tensor] = []
        lives: list[Tensor] = []
        for name, live in self._live.items():
            if live.is_floating_point():
                # Elementwise, so each rank averages its local parts; sharded and plain tensors do not mix in one call.
                averages.append(local_part(self.weights[name]))
                lives.append(local_part(live))
            else:
                self.weights[name].copy_(live)
        rounds = self.num_updates // self.interval
        decay = min(self.decay, (1 + rounds) / (10 + rounds)) if self.warmup else self.decay
        torch._foreach_lerp_(averages, lives, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averaged weights into the model, and the trained ones back on exit, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, live in self._live.items():
            held = live.detach().clone()
            live.copy_(self.weights[name])
            self.weights[name].copy_(held)

    def state_dict(self) -> dict[str, Any]:
        """Return `{"weights": tensors by name, "num_updates": int}`."""
        return {"weights": dict(self.weights), "num_updates": self.num_updates}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        weights = state["weights"]
        if weights.keys() != self.weights.keys():
            missing = sorted(self.weights.keys() - weights.keys())
            unexpected = sorted(weights.keys() - self.weights.keys())
            raise CheckpointMismatch(
                f"Expected averaged weights of this model. Received: missing={missing[:5]}, unexpected={unexpected[:5]}."
            )
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
        self.num_updates = int(state.get("num_updates", 0))
