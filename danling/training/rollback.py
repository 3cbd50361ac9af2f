"""What the forwards of an update change besides gradients, remembered so that the update can be made again as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from danling.data import capture_random_state, restore_random_state
from danling.metrics import Meters

from .carry import map_carry


class CountsMicroSteps(Protocol):
    """What counts the micro-batches of a run."""

    micro_step: int


class Carries(Protocol):
    """What carries something from one micro-batch to the next.

    Attributes:
        carry: See `map_carry`.
    """

    carry: Any


def buffers_of(model: nn.Module, more: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Return what a forward may change besides gradients, by name.

    Args:
        model: The bare model.
        more: Buffers beside it, such as those of a criterion.
    """
    return {**dict(model.named_buffers()), **{f"criterion.{i}": buffer for i, buffer in enumerate(more)}}


def remember_forwards(
    run: Carries,
    device: torch.device,
    *,
    counter: CountsMicroSteps,
    meters: Meters,
    buffers: Callable[[], Mapping[str, Tensor]],
) -> Callable[[], None]:
    """Remember random streams, buffers, meters, counts and what is carried, and return what puts them back. No communication.

    Args:
        run: Carries something from one micro-batch to the next.
        device: Where forwards draw random numbers.
        counter: What counts the micro-batches.
        meters: What a forward may add metrics to.
        buffers: Returns by name what a forward may write to; a buffer that is registered later is left as it is.
    """
    streams, micro_step, figures = capture_random_state(device), counter.micro_step, meters.state_dict()
    carry = map_carry(run.carry, Tensor.clone)
    values = {name: buffer.clone() for name, buffer in buffers().items()}

    def put_back() -> None:
        restore_random_state(streams, device)
        counter.micro_step = micro_step
        meters.load_state_dict(figures)
        run.carry = map_carry(carry, Tensor.clone)
        for name, buffer in buffers().items():
            if name in values:
                buffer.copy_(values[name])

    return put_back
