"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from danling.checkpoints.errors import CheckpointMismatch
from danling.utils.tensors import bucketed, canonical_name, local_part


class EMA:
    """A moving average of the parameters, kept shard by shard next to the model.

    Averages are float32 where the parameter is narrower: at a decay of .999 an average in bfloat16 rounds nearly every update away. float64
    stays float64, and complex numbers are kept in at least complex64. The model gets them in its own dtype. Buffers are copied, as
    `torch.optim.swa_utils.AveragedModel` does; so are integer parameters. The average lives on the parameters' own devices and layouts,
    so it works on sharded models, where a deep copy would not.

    Args:
        model: The bare model (not wrapped in DDP).
        decay: Weight of the past, in [0, 1).
        warmup: Ramp the decay as `min(decay, (1 + n) / (10 + n))` after `n` updates, as TensorFlow's
            `ExponentialMovingAverage(num_updates=...)` does, so that early weights are forgotten.
        interval: Average once in so many committed updates.
        buffers: `"average"` also averages floating buffers, such as running statistics; elements that are not finite are copied.

    Raises:
        ValueError: If `decay`, `interval` or `buffers` is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decay: float = 0.999,
        warmup: bool = False,
        interval: int = 1,
        buffers: Literal["copy", "average"] = "copy",
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"Expected 0 <= ema.decay < 1. Received: ema.decay={decay!r}.")
        if interval < 1:
            raise ValueError(f"Expected ema.interval >= 1. Received: ema.interval={interval!r}.")
        if buffers not in ("copy", "average"):
            raise ValueError(
                f"Expected ema.buffers to be 'copy' or 'average'. Received: ema.buffers={buffers!r}."
            )
        self.decay = decay
        self.warmup = warmup
        self.interval = interval
        self.buffers = buffers
        self.num_updates = 0
        # Names without the prefixes of wrappers, so that the averages load into the same model in another wrapper.
        saved = model.state_dict(keep_vars=True)
        parameters = {
            canonical_name(name): parameter for name, parameter in model.named_parameters()
        }
        persistent = {
            canonical_name(name): buffer for name, buffer in model.named_buffers() if name in saved
        }
        self._live: dict[str, Tensor] = {**parameters, **persistent}
        name_of = {id(buffer): name for name, buffer in persistent.items()}
        self._owners = {
            name_of[id(buffer)]: (module, key)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if id(buffer) in name_of
        }
        averaged = self._live if buffers == "average" else parameters
        self._averaged = {name for name, tensor in averaged.items() if _can_average(tensor)}
        self._averaged_buffers = [name for name in self._owners if name in self._averaged]
        self._copied = [name for name in self._live if name not in self._averaged]
        self.weights = {name: self._start_of(name, tensor) for name, tensor in self._live.items()}

    def _start_of(self, name: str, tensor: Tensor) -> Tensor:
        start = tensor.detach().clone()
        return start.to(_wide_dtype(tensor.dtype)) if name in self._averaged else start

    @property
    def kept_buffers(self) -> list[Tensor]:
        """What is kept of the model's persistent buffers, copies or averages, in the same order on all ranks. No communication."""
        return [self.weights[name] for name in self._owners]

    def _see_buffers(self) -> None:
        """Find the tensors that are the buffers now: a module may assign a new one in its forward, or give the one there another size."""
        for name, (module, key) in self._owners.items():
            live = module._buffers[key]
            if live is None:
                continue
            before, self._live[name] = self._live[name], live
            if live.shape != self.weights[name].shape or live.dtype != before.dtype:
                self.weights[name] = self._start_of(name, live)

    @cached_property
    def _together(self) -> list[list[str]]:
        """The names that are averaged in one call; what is widened for it comes in buckets, so that it needs little memory.

        Made at the first update: an engine may have changed the dtype of the model by then.
        """
        together: dict[tuple[torch.dtype, torch.dtype, torch.device], list[str]] = {}
        for name in self._live:
            if name in self._averaged:
                average, live = self.weights[name], self._live[name]
                together.setdefault((average.dtype, live.dtype, average.device), []).append(name)
        found = []
        for (dtype, own, _), names in together.items():
            name_of = {id(self.weights[name]): name for name in names}
            averages = [self.weights[name] for name in names]
            buckets = [averages] if dtype == own else bucketed(averages)
            found += [[name_of[id(average)] for average in bucket] for bucket in buckets]
        return found

    @torch.no_grad()
    def reset(self) -> None:
        """Begin the average anew at the current weights."""
        self.num_updates = 0
        self._see_buffers()
        for name, live in self._live.items():
            self.weights[name].copy_(live)

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into the average; called once for a committed update."""
        self.num_updates += 1
        if self.num_updates % self.interval:
            return
        # The warm-up counts the averages that were taken, not the updates between them.
        rounds = self.num_updates // self.interval
        decay = min(self.decay, (1 + rounds) / (10 + rounds)) if self.warmup else self.decay
        self._see_buffers()
        for names in self._together:
            # Elementwise, so each rank averages its local parts.
            averages = [local_part(self.weights[name]) for name in names]
            lives = [local_part(self._live[name]) for name in names]
            if averages[0].dtype != lives[0].dtype:
                lives = [live.to(averages[0].dtype) for live in lives]
            torch._foreach_lerp_(averages, lives, 1.0 - decay)
        for name in self._copied:
            self.weights[name].copy_(self._live[name])
        for name in self._averaged_buffers:
            # An infinite element, as of a mask, has no average: inf - inf is NaN.
            average, live = local_part(self.weights[name]), local_part(self._live[name])
            average.copy_(torch.where(average.isfinite(), average, live))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the averaged weights into the model in its own dtype, and the trained ones back on exit, bit for bit."""
        kept = self._put_in()
        try:
            yield
        finally:
            self._take_out(kept)

    @torch.no_grad()
    def _put_in(self) -> dict[str, Tensor]:
        """Put the averages into the model, and return the trained weights that the averages cannot hold meanwhile."""
        kept = {}
        self._see_buffers()
        for name, live in self._live.items():
            trained = live.detach().clone()
            live.copy_(self.weights[name])
            if live.dtype == self.weights[name].dtype:
                # They change places, so that an evaluation needs no memory for a third set of weights.
                self.weights[name].copy_(trained)
            else:
                kept[name] = trained
        return kept

    @torch.no_grad()
    def _take_out(self, kept: Mapping[str, Tensor]) -> None:
        for name, (module, key) in self._owners.items():
            # An evaluation that assigns a new tensor leaves the buffer of training as it was.
            module._buffers[key] = self._live[name]
        for name, live in self._live.items():
            if name in kept:
                live.copy_(kept[name])
                continue
            # The averages are in the model, and the trained weights here: they change places again.
            averaged = live.detach().clone()
            if live.shape != self.weights[name].shape:
                live.resize_(self.weights[name].shape)
            live.copy_(self.weights[name])
            self.weights[name] = self._filled(self.weights[name], averaged)

    @staticmethod
    def _filled(buffer: Tensor, values: Tensor) -> Tensor:
        """Return the copy of a buffer with other values, which may be more or fewer."""
        return (
            buffer.copy_(values) if buffer.shape == values.shape else values.to(buffer, copy=True)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return `{"weights": tensors by name, "num_updates": int, "buffers": "copy" or "average"}`."""
        return {
            "weights": dict(self.weights),
            "num_updates": self.num_updates,
            "buffers": self.buffers,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also that of a version with averages in the dtype of the model and averaged buffers."""
        weights = state["weights"]
        if weights.keys() != self.weights.keys():
            missing = sorted(self.weights.keys() - weights.keys())
            unexpected = sorted(weights.keys() - self.weights.keys())
            raise CheckpointMismatch(
                f"Expected averaged weights of this model. Received: missing={missing[:5]}, unexpected={unexpected[:5]}. To begin those "
                "that are new from this model's weights, or to leave out what it lacks, add "
                f"{entries_of('ema.weights', missing + unexpected)} to checkpoint.exclude_from_loading, next to the entry of `model`."
            )
        shapes = {
            name: (tuple(tensor.shape), tuple(self.weights[name].shape))
            for name, tensor in weights.items()
            if name not in self._owners and tensor.shape != self.weights[name].shape
        }
        if shapes:
            listed = ", ".join(
                f"{name} of {stored}, here {own}"
                for name, (stored, own) in list(shapes.items())[:5]
            )
            raise CheckpointMismatch(
                f"Expected averaged weights of this model's shapes. Received: {listed} ({len(shapes)} in all). To begin them from "
                f"this model's, add {entries_of('ema.weights', shapes)} to checkpoint.exclude_from_loading, next to the entry of `model`."
            )
        self._see_buffers()
        for name, tensor in weights.items():
            if name in self._owners:
                self.weights[name] = self._filled(self.weights[name], tensor)
            else:
                self.weights[name].copy_(tensor)
        self.num_updates = int(state.get("num_updates", 0))
        if self.buffers == "copy" and state.get("buffers") != "copy":
            # Those of the checkpoint are averages.
            for name in self._owners:
                self.weights[name].copy_(self._live[name])


def entries_of(component: str, names: Iterable[str]) -> str:
    """Return entries of checkpoint.exclude_from_loading for the modules of some weights."""
    entries = sorted({f"{component}.{name.rpartition('.')[0] or name}" for name in names})
    return ", ".join(map(repr, entries[:5]))


def _can_average(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an average: that of the weight, but float32, or complex64, for narrower ones."""
    widest = torch.complex64 if dtype.is_complex else torch.float32
    return dtype if dtype.itemsize >= widest.itemsize else widest
