"""The micro-batches of an update, run again from the same beginning: random numbers follow from their keys."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from danling.data import Batch, BatchSource, DataLoader
from danling.supervision.failures import is_out_of_memory

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

RunWindow = Callable[[BatchSource, Iterator[Batch], list[Batch]], bool]
"""Runs forward and backward of one update; see `UpdateStep.run_window`."""


class Recompute:
    """Takes the micro-batches of an update back, so that they can be run again.

    Puts back everything that they change: buffers, meters, counters, the carry, the user's attributes, the window and its gradient.
    Batches are not copied: a step that has written to its batch cannot be run again, which is refused.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}

    def remember(self, *, window: bool = True) -> Callable[[], None]:
        """Remember where an update begins, and return what takes its micro-batches back. No communication."""
        runner = self._runner
        self._versions = {}
        buffers = {name: buffer.clone() for name, buffer in self._buffers().items()}
        carry, put_attributes_back = map_carry(runner.carry, Tensor.clone), runner._attributes.remember()
        metrics = runner._parts.train_metrics
        put_metrics_back = metrics.remember() if metrics is not None else None
        figures, micro_step = runner.meters.state_dict(), runner.state.train.micro_step

        def take_back() -> None:
            if window:
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
        of_criterion = self._runner._criterion_tensors("buffers")
        return {
            **dict(self._runner.unwrapped_model.named_buffers()),
            **{f"criterion.{number}": buffer for number, buffer in enumerate(of_criterion)},
        }


class MemoryRetry:
    """Runs the micro-batches of an update again in smaller ones where memory ran out, before anything was updated.

    Forward and backward must not communicate: a rank that ran out would leave the others waiting. Afterwards the ranks agree in one
    collective whether one of them did.
    """

    def __init__(self, runner: TorchRunner, run_window: RunWindow, recompute: Recompute) -> None:
        self._runner = runner
        self._run_window = run_window
        self._recompute = recompute

    def run_window(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update; `False` where memory ran out, and smaller micro-batches are to come."""
        runner, loader = self._runner, source.loader
        held = loader.held_at_once if isinstance(loader, DataLoader) else 0
        if held == 0:
            return self._run_window(source, batches, consumed)
        # What ranks otherwise do together within an update comes before it: each of them has to come through it alone.
        if runner.preparation.broadcasts_buffers:
            runner.broadcast_buffers()
        if runner.window.agreed_reference is None and runner.placement.optimizer.size > 1:
            runner.window.agreed_reference = float(held)
        if held == 1:
            # Nothing is left to halve: the user gets the error with its traceback.
            return self._run_window(source, batches, consumed)
        if self.attempt(lambda: self._run_window(source, batches, consumed), self._recompute.remember()):
            return True
        runner.state.elastic.micro_batch_size = held // 2
        runner._data.splits.hold_at_most(held // 2)
        if runner.is_main_process:
            logger.warning(
                "Memory ran out in update %d with micro-batches of %d samples: it is made again with at most %d, which changes nothing "
                "else. The size is kept, also when the run is resumed; dataloader.micro_batch_size=%d begins with it.",
                runner.state.train.global_step + 1,
                held,
                held // 2,
                held // 2,
            )
        return False

    def attempt(self, make: Callable[[], object], take_back: Callable[[], None]) -> bool:
        """Return whether all ranks succeeded; if memory ran out on one, undo the changes on all. Call on all ranks."""
        failed = False
        try:
            make()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        # Not in the `except` block: the traceback would keep the tensors of the forward alive.
        domain, device = self._runner.placement.optimizer, self._runner.device
        if domain.size > 1:
            failed = bool(domain.all_reduce(torch.tensor(float(failed), dtype=torch.float64), "max").item())
        if failed:
            take_back()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return not failed


def map_carry(carry: Any, change: Callable[[Tensor], Tensor], path: str = "self.carry") -> Any:
    """Return a carry with each tensor changed; lists, tuples and mappings are made anew, mappings as `dict`."""
    if isinstance(carry, Tensor):
        return change(carry)
    if carry is None or isinstance(carry, (bool, int, float, str)):
        return carry
    if isinstance(carry, Mapping):
        return {key: map_carry(value, change, f"{path}[{key!r}]") for key, value in carry.items()}
    if type(carry) in (list, tuple):
        return type(carry)(map_carry(value, change, f"{path}[{index}]") for index, value in enumerate(carry))
    raise TypeError(
        f"Expected self.carry to be of tensors, numbers and None, and of lists, tuples and mappings of them. Received: {path} of type "
        f"{type(carry).__name__}. Put its tensors into a tuple."
    )


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
