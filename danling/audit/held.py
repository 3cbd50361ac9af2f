"""What an update may write to, copied so that it can be put back bitwise: tensors, optimizers, and plain attributes of objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from danling.utils.tensors import local_part

from .hashing import Hasher, key_of

Named = Iterable[tuple[str, Tensor]]
"""Tensors, or what this rank holds of them, each under a name of its own."""
PutBack = Callable[[], None]
"""Puts something back as it was."""

K = TypeVar("K")

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


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

    def digests(self) -> dict[str, Tensor]:
        """Return the digest of each tensor, 0-dim int64 on its device."""
        return {name: self._digest(tensor) for name, tensor in self._tensors()}

    def _digest(self, tensor: Tensor) -> Tensor:
        part = local_part(tensor.detach())
        # What a rank holds is compared with itself alone: its shape is part of it, its place in a whole is not.
        return self._hasher.digest(part) * key_of(part.dtype, tuple(part.shape))

    @torch.no_grad()
    def copy(self, known: StateCopy | None = None) -> StateCopy:
        """Return a copy of what is held now.

        Args:
            known: An earlier copy; what has not changed since is shared with it.
        """
        held = dict(self._tensors())
        digests = read_digests({name: self._digest(tensor) for name, tensor in held.items()})
        clones = {}
        for name, tensor in held.items():
            same = known is not None and known.digests.get(name) == digests[name]
            clones[name] = known.clones[name] if known is not None and same else local_part(tensor.detach()).clone()
        return StateCopy(digests, clones, [remember() for remember in self._structures])

    def changed(self, copy: StateCopy) -> list[str]:
        """Return the names of the tensors that are not what they were when a copy was made.

        Args:
            copy: The copy.
        """
        return differing(copy.digests, read_digests(self.digests()))

    @torch.no_grad()
    def put_back(self, copy: StateCopy, *, tensors_alone: bool = False) -> list[str]:
        """Make everything what it was when a copy was made, in place; what has not changed is not written to.

        Args:
            copy: The copy.
            tensors_alone: Leave settings of optimizers and attributes as they are.

        Returns:
            The names of what could not be: the copy has changed itself, or a tensor is gone.
        """
        for put_back in () if tensors_alone else copy.structure:
            put_back()
        held = dict(self._tensors())
        now = read_digests({name: self._digest(tensor) for name, tensor in held.items()})
        changed = [name for name in copy.digests if name in held and now.get(name) != copy.digests[name]]
        if not changed:
            return differing(copy.digests, now)
        for name in changed:
            local_part(held[name].detach()).copy_(copy.clones[name])
        return self.changed(copy)


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
    attributes = remember_attributes(optimizer)

    def put_back() -> None:
        attributes()
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


def remember_attributes(*holders: object) -> PutBack:
    """Remember attributes of objects: numbers, texts, and what stands in lists, mappings and sets, which are put back in place.

    A counter that decides what a step does, or a list to which it adds, then looks to each attempt as it did to the first. New
    attributes, and objects of other classes, are left as they are.

    Args:
        holders: The objects.
    """
    kept = [(holder, dict(_attributes(holder))) for holder in holders]
    contents = [(value, _content(value)) for _, held in kept for value in held.values() if not _is_plain(value)]

    def put_back() -> None:
        for holder, held in kept:
            for name, value in held.items():
                if vars(holder).get(name) is not value:
                    vars(holder)[name] = value
        for value, content in contents:
            _set_content(value, content)

    return put_back


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _attributes(holder: object) -> Iterator[tuple[str, Any]]:
    skipped = _OF_MODULES if isinstance(holder, nn.Module) else frozenset()
    for name, value in getattr(holder, "__dict__", {}).items():
        if name not in skipped and (_is_plain(value) or type(value) in (list, dict, set, deque)):
            yield name, value


def _content(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _set_content(value: Any, content: Any) -> None:
    if isinstance(value, (list, deque)):
        if len(value) != len(content) or any(now is not then for now, then in zip(value, content)):
            value.clear()
            value.extend(content)
        return
    if isinstance(value, dict):
        same = value.keys() == content.keys() and all(value[key] is content[key] for key in content)
    else:
        same = value == content
    if not same:
        value.clear()
        value.update(content)
