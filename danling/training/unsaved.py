"""Finds what a runner holds beside its components, training changes, and no checkpoint has: a teacher, a second optimizer, a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from danling.utils.names import canonical_name
from danling.utils.tensors import local_part

_MOST_ENTRIES = 100
_MOST_ELEMENTS = 1 << 16
_KINDS = (nn.Module, Optimizer, LRScheduler)

Part = nn.Module | Optimizer | LRScheduler | dict[str, Tensor]
Print = tuple[str, int, float]
"""Of a tensor, or of an optimizer or a schedule: its kind, how many entries it has, and a sum."""


class UnsavedParts:
    """What of a runner's own attributes changes in a training. No communication.

    Modules, optimizers and schedules are looked at, also in lists, tuples and mappings, and mappings of tensors by the names of parameters,
    as averages of one's own are kept. Sums of some thousand elements of each tensor tell: assignments to `.data` are seen too, and a large
    teacher costs no more than a small one. It is a hint, and never ends a training.

    Args:
        attributes: Returns the attributes that may hold such parts, by name.
        saved: Returns what checkpoints have: modules, optimizers, schedules; `None` is left out.
    """

    def __init__(self, attributes: Callable[[], Mapping[str, object]], saved: Callable[[], Iterable[object]]) -> None:
        self._attributes = attributes
        self._saved = saved
        self._before: dict[str, list[Print]] = {}

    def begin(self) -> None:
        """Look at what there is before a training."""
        self._before = self._look()

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed since; those that came to be since, or were cast or moved, are left out."""
        now = self._look() if self._before else {}
        return [name for name, before in self._before.items() if _is_other(before, now.get(name, []))]

    def _look(self) -> dict[str, list[Print]]:
        held = {name: list(_parts_of(value)) for name, value in list(self._attributes().items())}
        if not any(held.values()):
            return {}
        saved = [part for part in self._saved() if part is not None]
        objects = {id(part) for each in saved for part in _parts_within(each)}
        modules = [each for each in saved if isinstance(each, nn.Module)]
        tensors = {id(tensor) for each in modules for tensor in _state_of_module(each)}
        names = {canonical_name(name) for each in modules for name, _ in each.named_parameters()}
        found = {}
        for name, parts in held.items():
            prints = [
                each
                for part in parts
                if id(part) not in objects and (not isinstance(part, dict) or part.keys() <= names)
                for each in _prints_of(part, tensors)
            ]
            if prints:
                found[name] = prints
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


def _is_other(before: list[Print], now: list[Print]) -> bool:
    if len(before) != len(now):
        return False
    # An optimizer has no state before its first step.
    return any(
        count != count_now or (kind == kind_now and total != total_now)
        for (kind, count, total), (kind_now, count_now, total_now) in zip(before, now)
    )


def _parts_of(value: object) -> Iterator[Part]:
    if isinstance(value, _KINDS):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (each for each in itertools.islice(value, _MOST_ENTRIES) if isinstance(each, _KINDS))
    elif type(value) is dict and value:
        if all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items()):
            yield value
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


def _prints_of(part: Part, saved: Collection[int]) -> list[Print]:
    if isinstance(part, LRScheduler):
        return [("", 0, float(part.last_epoch))]
    if isinstance(part, Optimizer):
        state = [value for entry in part.state.values() for value in entry.values()]
        kept = [_print(value) for value in state if isinstance(value, Tensor)]
        return [("", len(state), sum(total for _, _, total in kept))]
    tensors = part.values() if isinstance(part, dict) else _state_of_module(part)
    return [_print(tensor) for tensor in tensors if id(tensor) not in saved]


def _state_of_module(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@torch.no_grad()
def _print(tensor: Tensor) -> Print:
    """Return the kind of a tensor, and the sum of elements out of all of it; 0 where it has none, or none that can be added up."""
    try:
        local = local_part(tensor.detach())
        flat = (torch.view_as_real(local) if local.is_complex() else local).reshape(-1)
        total = float(flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].sum(dtype=torch.float64))
    except Exception:  # lazy, quantized, sparse, on no device
        return "", 0, 0.0
    return (
        f"{tensor.dtype} {tensor.device}",
        0,
        total if total == total else float("inf"),
    )  # a NaN would differ from itself
