"""What an object reaches that a step of a user's may write to: tensors, generators, optimizers, and what has attributes or entries.

Attributes, lists, tuples, mappings, sets and queues are followed, through modules and objects of classes of the user's and of most
packages. Left alone are the library's own objects, those of torch and of engines, of Python's standard library, what has a thread, a lock
or a file, and closures, class attributes and module variables, in which nobody keeps what a step counts if it is to be resumed.
"""

from __future__ import annotations

import enum
import io
import logging
import queue
import socket
import subprocess
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from danling.data.generators import is_generator

PutBack = Callable[[], None]
"""Puts something back as it was."""

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice, type(...)})
_PLACES = frozenset({dict, list, set, deque})
_OWN_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_OWN_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
_PACKAGES = frozenset({"torch", "numpy", "deepspeed", "accelerate", "torchft"})
_FOLLOWED: tuple[type[Any], ...] = (LRScheduler, torch.amp.GradScaler, types.SimpleNamespace)
"""Classes of torch and of Python's library whose attributes a step may change."""
_LEFT: tuple[type[Any], ...] = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.CodeType),
    *(weakref.ReferenceType, io.IOBase, threading.Thread, subprocess.Popen, socket.socket, queue.Queue, Executor),
    *(BaseException, enum.Enum, logging.Filterer, PurePath, torch.dtype, torch.device),
)
_LIVE: tuple[type[Any], ...] = (
    *(threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition),
    *(threading.Semaphore, queue.Queue, Executor, io.IOBase, subprocess.Popen, socket.socket),
)
"""What has one of them goes on by itself: it cannot be put back by its attributes."""


@dataclass
class Reached:
    """What was found, each thing once.

    Attributes:
        tensors: By kind and path, such as `weights/critic.0.weight`; arrays of NumPy as tensors on their memory.
        generators: Of torch, of NumPy and `random.Random`, by path.
        optimizers: Of torch's kind.
        holders: What has attributes or entries, by path.
        leaves: Parameters that have a gradient of their own.
    """

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    generators: list[tuple[str, Any]] = field(default_factory=list)
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    holders: list[tuple[str, Any]] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)


def reach(
    roots: Iterable[tuple[str, object]], *, apart: Iterable[object] = (), own_gradient: Callable[[Tensor], bool]
) -> Reached:
    """Return what objects reach. Nothing is called, and no property is read.

    Args:
        roots: The objects by name, which begins the path.
        apart: Objects that are left alone, such as those of data sets, which go on when a batch is read.
        own_gradient: Whether a leaf has a gradient that nobody else puts back.
    """
    found = Reached()
    # The objects too, so that none is freed and its id given to another one.
    seen: dict[int, object] = {id(value): value for value in apart}
    waiting: deque[tuple[str, str, object]] = deque(("attribute", path, value) for path, value in roots)
    while waiting:
        kind, path, value = waiting.popleft()
        if type(value) in _ATOMS or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            _take_tensor(found, kind, path, value, own_gradient)
        elif is_generator(value):
            found.generators.append((path, value))
        elif _is_array(value):
            tensor = _tensor_of(value)
            if tensor is not None:
                found.tensors.append((f"attribute/{path}", tensor))
        elif isinstance(value, (tuple, frozenset)):
            waiting.extend(("attribute", f"{path}.{number}", item) for number, item in enumerate(value))
        elif not is_left(value):
            if isinstance(value, Optimizer):
                found.optimizers.append((path, value))
            found.holders.append((path, value))
            waiting.extend(
                (of, f"{path}.{key}" if path else str(key), item)
                for of, key, item in _held_by(value)
                if type(item) not in _ATOMS
            )
    return found


def _take_tensor(found: Reached, kind: str, path: str, tensor: Tensor, own_gradient: Callable[[Tensor], bool]) -> None:
    kind = "weights" if isinstance(tensor, nn.Parameter) else kind
    found.tensors.append((f"{kind}/{path}", tensor))
    if tensor.is_leaf and tensor.requires_grad and own_gradient(tensor):
        found.leaves.append(tensor)
        if tensor.grad is not None:
            found.tensors.append((f"gradients/{path}", tensor.grad))


def is_left(value: object) -> bool:
    """Return whether an object is left alone: the library's, a package's that has its own ways to be put back, or one that goes on by
    itself."""
    if isinstance(value, _LEFT):
        return True
    if isinstance(value, (nn.Module, Optimizer, *_FOLLOWED)):
        return False
    kind = type(value)
    if kind in _PLACES or kind.__module__ == "collections":
        return False
    package = kind.__module__.partition(".")[0]
    if package in _PACKAGES or package in sys.stdlib_module_names:
        return True
    if any(base.__module__.partition(".")[0] == "danling" for base in kind.__mro__):
        return True
    return any(isinstance(part, _LIVE) for part in _attributes(value).values())


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _tensor_of(array: Any) -> Tensor | None:
    if not getattr(array, "flags", None) or not array.flags.writeable or array.dtype.kind not in "biufc":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


def _attributes(value: object) -> dict[str, Any]:
    """Return the `__dict__` of an object, the very one; an empty one where it has none, or answers with an error of its own."""
    try:
        held = value.__dict__
    except Exception:
        return {}
    return held if isinstance(held, dict) else {}


def _slots(value: object) -> dict[str, Any]:
    names = [
        name
        for kind in type(value).__mro__
        for slots in (vars(kind).get("__slots__", ()),)
        for name in ((slots,) if isinstance(slots, str) else slots)
        if name not in ("__dict__", "__weakref__") and not name.startswith("__")
    ]
    missing = object()
    found = {name: getattr(value, name, missing) for name in names}
    return {name: held for name, held in found.items() if held is not missing}


def _held_by(value: Any) -> Iterator[tuple[str, object, object]]:
    """Yield what an object holds directly, each with its kind and its name."""
    if isinstance(value, dict):
        yield from (("attribute", key, held) for key, held in list(dict.items(value)))
    elif isinstance(value, (list, deque, set)):
        yield from (("attribute", number, held) for number, held in enumerate(list(value)))
    if isinstance(value, nn.Module):
        yield from (("weights", key, held) for key, held in value._parameters.items())
        yield from (("buffers", key, held) for key, held in value._buffers.items())
        yield from (("attribute", key, held) for key, held in value._modules.items())
    skipped = _skipped_of(value)
    yield from (("attribute", key, held) for key, held in list(_attributes(value).items()) if key not in skipped)
    yield from (("attribute", key, held) for key, held in _slots(value).items())


def _skipped_of(value: object) -> frozenset[str]:
    """Return the attributes of which others take care, or which a wrapper exchanges while it computes."""
    if isinstance(value, nn.Module):
        return _OWN_OF_MODULES
    return _OWN_OF_OPTIMIZERS if isinstance(value, Optimizer) else frozenset()


# Put back


def remember(found: Reached) -> PutBack:
    """Remember attributes, entries and gradients by reference, and return what puts them back in place.

    A counter that decides what a step does, or a list to which it adds, then looks to each attempt as it did to the first; what a step has
    added is gone again.

    Args:
        found: Where they are.
    """
    parts = [part for _, holder in found.holders for part in _remembered(holder)]
    gradients = [(leaf, leaf.grad) for leaf in found.leaves]

    def put_back() -> None:
        for part in parts:
            part()
        for leaf, gradient in gradients:
            if leaf.grad is not gradient:
                leaf.grad = gradient

    return put_back


def _remembered(holder: Any) -> Iterator[PutBack]:
    if isinstance(holder, (dict, list, deque, set)):
        yield _remember_entries(holder)
    if isinstance(holder, nn.Module):
        yield _remember_entries(holder._buffers)
    attributes = _attributes(holder)
    if attributes:
        yield _remember_attributes(holder, attributes)
    slots = _slots(holder)
    if slots:
        yield partial(_set_slots, holder, slots)


def _set_slots(holder: object, slots: Mapping[str, object]) -> None:
    for name, held in slots.items():
        object.__setattr__(holder, name, held)


def _remember_attributes(holder: object, live: dict[str, Any]) -> PutBack:
    skipped = _skipped_of(holder)
    kept = {name: held for name, held in live.items() if name not in skipped and not _is_library(held)}
    known, kind = frozenset(live), type(holder)

    def put_back() -> None:
        for name in [name for name in live if name not in known]:
            if not isinstance(getattr(kind, name, None), cached_property) and not _is_library(live[name]):
                del live[name]
        for name, held in kept.items():
            if live.get(name, kept) is not held and not _is_library(live.get(name)):
                live[name] = held

    return put_back


def _is_library(value: object) -> bool:
    return type(value).__module__.startswith("danling.") and not isinstance(value, (nn.Module, Optimizer, LRScheduler))


def _remember_entries(holder: Any) -> PutBack:
    return _remember_items(holder) if isinstance(holder, dict) else _remember_members(holder)


def _remember_items(holder: dict[Any, Any]) -> PutBack:
    entries = dict(dict.items(holder))
    # Not `update` of a Counter, which adds, nor `clear` of a class of the user's.
    kind: Any = OrderedDict if isinstance(holder, OrderedDict) else dict

    def put_back() -> None:
        now = dict(dict.items(holder))
        if list(now) != list(entries) or any(now[key] is not held for key, held in entries.items()):
            kind.clear(holder)
            kind.update(holder, entries)

    return put_back


def _remember_members(holder: Any) -> PutBack:
    members = list(holder)

    def put_back() -> None:
        if isinstance(holder, set):
            if holder != set(members):
                holder.clear()
                holder.update(members)
        elif len(holder) != len(members) or any(now is not then for now, then in zip(holder, members)):
            holder.clear()
            holder.extend(members)

    return put_back


def watch(found: Reached) -> Callable[[], list[str]]:
    """Look at attributes, entries and the versions of tensors, and return what names those that have changed since.

    Args:
        found: Where they are.
    """
    held = [(path, holder, _named_by(holder)) for path, holder in found.holders]
    versions = [(name.partition("/")[2], tensor, _version(tensor)) for name, tensor in found.tensors]

    def changed() -> list[str]:
        names = [name for name, tensor, version in versions if _version(tensor) != version]
        for path, holder, before in held:
            now = _named_by(holder)
            differing = [key for key in {**before, **now} if before.get(key, before) is not now.get(key, before)]
            names += [f"{path}.{key}" if path else str(key) for key in differing]
        return names

    return changed


def _named_by(holder: Any) -> dict[object, object]:
    return {key: held for _, key, held in _held_by(holder)}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def remember_attributes(*holders: object) -> PutBack:
    """Remember the attributes of objects, and what these reach; see `remember`.

    Args:
        holders: The objects.
    """
    return remember(reach([("", holder) for holder in holders], own_gradient=lambda _: False))
