"""What an update may write to, copied so that it can be put back bitwise: tensors, optimizers, and plain attributes of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from danling.utils.tensors import local_part

from .hashing import Hasher
from .reached import PutBack

Named = Iterable[tuple[str, Tensor]]
"""Tensors, or what this rank holds of them, each under a name of its own."""

K = TypeVar("K")


def read_digests(digests: Mapping[K, Tensor]) -> dict[K, int]:
    """Return digests as integers, in one transfer from each device.

    Args:
        digests: 0-dim int64 by name.
    """
    found: dict[K, int] = {}
    for device in dict.fromkeys(digest.device for digest in digests.values()):
        names = [name for name, digest in digests.items() if digest.device == device]
        found.update(zip(names, torch.stack([digests[name] for name in names]).tolist()))
    return {name: found[name] for name in digests}


@dataclass
class StateCopy:
    """A copy of what a run holds.

    Attributes:
        digests: Of each tensor, by name.
        clones: What this rank held of it.
        structure: Puts back what is no tensor, and which tensors there were.
    """

    digests: dict[str, int]
    clones: dict[str, Tensor]
    structure: list[PutBack] = field(default_factory=list)


class HeldState:
    """What a run holds, and copies of it. Nothing is communicated.

    Args:
        tensors: Returns weights, optimizer state, buffers, averages, and what else an update may write to.
        structures: Return what puts things back that are no tensors, such as which entries an optimizer has.
        device: Where most of the tensors are.
    """

    def __init__(
        self, tensors: Callable[[], Named], structures: Sequence[Callable[[], PutBack]], device: torch.device
    ) -> None:
        self._tensors = tensors
        self._structures = structures
        self._hasher = Hasher(device)

    def read(self, known: StateCopy | None = None) -> dict[str, int]:
        """Return the digest of each tensor by name.

        Args:
            known: A copy; what is still the same, bit by bit, has the digest that it had then, which takes a fifth of the time.
        """
        held = dict(self._tensors())
        same = set() if known is None else _same_as(held, known.clones)
        found = {name: self._hasher.digest_held(tensor) for name, tensor in held.items() if name not in same}
        read = read_digests(found)
        return {name: read[name] if known is None or name in read else known.digests[name] for name in held}

    @torch.no_grad()
    def copy(self, known: StateCopy | None = None, now: Mapping[str, int] | None = None) -> StateCopy:
        """Return a copy of what is held now.

        Args:
            known: An earlier copy; what has not changed since is shared with it.
            now: What `read` returned at this very moment, where it was called.
        """
        held = dict(self._tensors())
        digests = {**(self.read(known) if now is None else now)}
        clones = {}
        for name, tensor in held.items():
            same = known is not None and known.digests.get(name) == digests[name]
            clones[name] = known.clones[name] if known is not None and same else local_part(tensor.detach()).clone()
        return StateCopy(digests, clones, [remember() for remember in self._structures])

    def changed(self, copy: StateCopy, now: Mapping[str, int] | None = None) -> list[str]:
        """Return the names of the tensors that are not what they were when a copy was made; new ones are left out.

        Args:
            copy: The copy.
            now: What `read` returned at this very moment, where it was called.
        """
        found = self.read(copy) if now is None else now
        return [name for name in copy.digests if found.get(name) != copy.digests[name]]

    @torch.no_grad()
    def put_back(self, copy: StateCopy, *, tensors_alone: bool = False, trusting: bool = False) -> list[str]:
        """Make everything what it was when a copy was made, in place; what has not changed is not written to.

        Args:
            copy: The copy.
            tensors_alone: Leave settings of optimizers and attributes as they are.
            trusting: Do not look whether the copy has changed itself, which takes another digest of all that is put back.

        Returns:
            The names of what could not be: the copy has changed itself, or a tensor is gone.
        """
        for put_back in () if tensors_alone else copy.structure:
            put_back()
        held = dict(self._tensors())
        same = _same_as(held, copy.clones)
        changed = [name for name in copy.clones if name in held and name not in same]
        if not trusting:
            now = read_digests({name: self._hasher.digest_held(held[name]) for name in changed})
            changed = [name for name in changed if now[name] != copy.digests[name]]
        for name in changed:
            _write(held[name], copy.clones[name])
        gone = [name for name in copy.clones if name not in held]
        if trusting:
            return gone
        now = read_digests({name: self._hasher.digest_held(held[name]) for name in changed})
        return gone + [name for name in changed if now[name] != copy.digests[name]]


_AT_ONCE = 1 << 16
"""Words of 8 bytes that are compared at once on the CPU, where they stay in its cache."""


@torch.no_grad()
def _same_as(held: Mapping[str, Tensor], clones: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that have the very bits of their clones; each device is asked once."""
    there: dict[str, Tensor] = {}
    same = set()
    for name, tensor in held.items():
        part, clone = local_part(tensor.detach()), clones.get(name)
        if clone is None or not _is_comparable(part, clone):
            continue
        first, second = _words(part), _words(clone)
        if part.device.type != "cpu":
            there[name] = (first == second).all().to(torch.int64)
        elif all(map(torch.equal, torch.split(first, _AT_ONCE), torch.split(second, _AT_ONCE))):
            same.add(name)
    return same | {name for name, found in read_digests(there).items() if found}


def _is_comparable(first: Tensor, second: Tensor) -> bool:
    plain = first.layout is second.layout is torch.strided and not (first.is_quantized or first.is_nested)
    alike = first.shape == second.shape and first.dtype == second.dtype and first.stride() == second.stride()
    # A computed one has other bits in its memory.
    return plain and alike and not (first.is_conj() or first.is_neg() or second.is_conj() or second.is_neg())


def _words(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as integers, of 8 bytes where it can be cut so."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    number = 8 // flat.element_size()
    fits = len(flat) % number == 0 and flat.storage_offset() % number == 0
    return flat.view(torch.int64 if fits else _INTEGERS[flat.element_size()])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _write(tensor: Tensor, clone: Tensor) -> None:
    """Give a tensor the values of its clone, in place."""
    part = local_part(tensor)
    if part.layout is not torch.strided or part.is_nested or part.shape != clone.shape:
        part.data = clone.clone()
    else:
        part.detach().copy_(clone)


def differing(first: Mapping[K, int], second: Mapping[K, int]) -> list[K]:
    """Return the names under which two mappings have different values, or one of them has none."""
    names = dict.fromkeys(chain(first, second))
    return [name for name in names if first.get(name) != second.get(name)]


# What is no tensor


def remember_optimizer(optimizer: Any) -> PutBack:
    """Remember which entries the state of an optimizer has, its plain values and settings; tensors are remembered by reference.

    Args:
        optimizer: Of torch, or like it.
    """
    state, groups = optimizer.state, optimizer.param_groups
    entries = {parameter: _shallow(entry) for parameter, entry in state.items()}
    settings = [{key: _shallow(value) for key, value in group.items() if key != "params"} for group in groups]

    def put_back() -> None:
        for parameter in [parameter for parameter in state if parameter not in entries]:
            del state[parameter]
        for parameter, entry in entries.items():
            if isinstance(entry, dict) and isinstance(state.get(parameter), dict):
                _refill(state[parameter], entry)
            else:
                state[parameter] = _shallow(entry)
        for group, kept in zip(optimizer.param_groups, settings):
            _refill(group, {**kept, "params": group["params"]})

    return put_back


def _shallow(value: Any) -> Any:
    """Return a copy of containers, which holds the same tensors and other objects."""
    if type(value) is dict:
        return {key: _shallow(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shallow(part) for part in value)
    return value


def _refill(live: dict[Any, Any], kept: Mapping[Any, Any]) -> None:
    for key in [key for key in live if key not in kept]:
        del live[key]
    for key, value in kept.items():
        if live.get(key) is not value:
            live[key] = _shallow(value)


def remember_scaler(scaler: Any) -> PutBack:
    """Remember what a gradient scaler knows of the update that is under way.

    Args:
        scaler: `torch.amp.GradScaler`.
    """
    kept = {key: _shallow(dict(known)) for key, known in scaler._per_optimizer_states.items()}

    def put_back() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update({key: _shallow(known) for key, known in kept.items()})

    return put_back
