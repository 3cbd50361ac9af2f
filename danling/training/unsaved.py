"""Finds what a runner holds beside its components, training changes, and no checkpoint has: a teacher, a second optimizer, a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from danling.utils.tensors import local_part

_MOST_ENTRIES = 100
_KINDS = (nn.Module, Optimizer, LRScheduler)

Part = nn.Module | Optimizer | LRScheduler


class UnsavedParts:
    """What of a runner's own attributes changes in a training. No communication.

    Modules, optimizers and schedules are looked at, also in lists, tuples and mappings, by the sums of their tensors: assignments to
    `.data` are seen too.

    Args:
        attributes: Returns the attributes that may hold such parts, by name.
        saved: Returns what checkpoints have: modules, optimizers, schedules; `None` is left out.
    """

    def __init__(self, attributes: Callable[[], Mapping[str, object]], saved: Callable[[], Iterable[object]]) -> None:
        self._attributes = attributes
        self._saved = saved
        self._before: dict[str, list[float]] = {}

    def begin(self) -> None:
        """Look at what there is before a training."""
        self._before = self._look()

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed since; those that came to be since are left out."""
        now = self._look() if self._before else {}
        return [name for name, sums in self._before.items() if name in now and now[name] != sums]

    def _look(self) -> dict[str, list[float]]:
        held = {name: list(_parts_of(value)) for name, value in list(self._attributes().items())}
        if not any(held.values()):
            return {}
        saved = [part for part in self._saved() if part is not None]
        objects = {id(part) for each in saved for part in _parts_within(each)}
        tensors = {id(tensor) for each in saved if isinstance(each, nn.Module) for tensor in _state_of_module(each)}
        found = {}
        for name, parts in held.items():
            sums = [each for part in parts if id(part) not in objects for each in _sums_of(part, tensors)]
            if sums:
                found[name] = sums
        return found


def unsaved_warning(names: Collection[str]) -> str:
    """Return a sentence that names what no checkpoint has.

    Args:
        names: Attributes of the runner.
    """
    listed = ", ".join(f"self.{name}" for name in names)
    return (
        f"Expected everything that a training changes in its checkpoints. Received: {listed}, changed since the training began and saved "
        "nowhere: a run that is resumed would go on with another one. Make it a part of `self.model`, or override `state_dict` and "
        "`load_state_dict` (see: Keeping something of your own in the checkpoint)."
    )


def _parts_of(value: object) -> Iterator[Part]:
    if isinstance(value, _KINDS):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (each for each in itertools.islice(value, _MOST_ENTRIES) if isinstance(each, _KINDS))
    elif type(value) is dict:
        yield from (each for each in itertools.islice(value.values(), _MOST_ENTRIES) if isinstance(each, _KINDS))


def _parts_within(part: object) -> Iterator[object]:
    """Yield what is saved with a part: submodules, the optimizers of several, and the schedules of a sequence."""
    yield part
    if isinstance(part, nn.Module):
        yield from part.modules()
        return
    for name in ("optimizers", "schedulers", "_schedulers", "optimizer", "inner", "base_optimizer"):
        within = getattr(part, name, None)
        for each in within if isinstance(within, (list, tuple)) else [within]:
            if isinstance(each, (Optimizer, LRScheduler)):
                yield each


def _sums_of(part: Part, saved: Collection[int]) -> list[float]:
    if isinstance(part, LRScheduler):
        return [float(part.last_epoch)]
    if isinstance(part, nn.Module):
        return _sums(tensor for tensor in _state_of_module(part) if id(tensor) not in saved)
    state = [value for entry in part.state.values() for value in entry.values()]
    # The count too: an optimizer has no state before its first step.
    return [float(len(state)), *_sums(value for value in state if isinstance(value, Tensor))]


def _state_of_module(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@torch.no_grad()
def _sums(tensors: Iterable[Tensor]) -> list[float]:
    held = [local_part(tensor.detach()) for tensor in tensors]
    return [_sum(tensor) for tensor in held if not tensor.is_meta and tensor.layout is torch.strided]


def _sum(tensor: Tensor) -> float:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    total = float(plain.sum(dtype=torch.float64))
    return total if total == total else float("inf")  # a NaN would differ from itself
