"""The micro-batches of an update, run again from the same beginning: random numbers follow from their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from .carry import map_carry

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


class Recompute:
    """Takes the micro-batches of an update back, so that they can be run again.

    What they change is put back: buffers, meters, counters, what is carried, attributes of the user's, the window and its gradient.
    Batches are not copied: a step that has written to its batch cannot be run again, which is refused.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}

    def remember(self) -> Callable[[], None]:
        """Remember where an update begins, and return what takes its micro-batches back. No communication."""
        runner, telemetry, flops = self._runner, self._runner._reporter.telemetry, self._runner._reporter.flops
        self._versions = {}
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        carry, put_attributes_back = map_carry(runner.carry, Tensor.clone), runner._attributes.remember()
        metrics = runner._parts.train_metrics
        put_metrics_back = metrics.remember() if metrics is not None else None
        figures, micro_step = runner.meters.state_dict(), runner.state.train.micro_step
        tokens, counts_next = telemetry.tokens if telemetry is not None else 0.0, flops.counts_next

        def take_back() -> None:
            runner.window.reset()
            runner.reduction.zero()
            put_attributes_back()
            for name, buffer in self._buffers().items():
                # One that was registered since is left as it is.
                if name in buffers:
                    buffer.copy_(buffers[name])
            runner.meters.load_state_dict(figures)
            if put_metrics_back is not None:
                put_metrics_back()
            runner.state.train.micro_step = micro_step
            runner.carry = map_carry(carry, Tensor.clone)
            flops.counts_next = counts_next
            if telemetry is not None:
                telemetry.tokens = tokens

        return take_back

    def check(self, data: object) -> None:
        """Note the version of the tensors of a batch before it is run, and refuse one that was changed since it was run before."""
        known = self._versions.setdefault(
            id(data), [(tensor, tensor._version) for tensor in _tensors(data) if not tensor.is_inference()]
        )
        for tensor, version in known:
            if tensor._version != version:
                raise ValueError(
                    "Expected `train_step` to leave the tensors of its batch as they are where an update may be computed again, as with "
                    f"ft.enabled. Received: one of shape {tuple(tensor.shape)} that was changed in place. Change a clone of it."
                )

    def _buffers(self) -> dict[str, Tensor]:
        of_criterion = self._runner._parts.wrapping.criterion_tensors("buffers")
        return {
            **dict(self._runner.unwrapped_model.named_buffers()),
            **{f"criterion.{number}": buffer for number, buffer in enumerate(of_criterion)},
        }


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
