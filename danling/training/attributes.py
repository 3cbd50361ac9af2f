"""Saves the attributes that users set on a runner, where they have changed, and restores them in place.

Values are encoded as tensors, plain values, and mappings of these with an entry `kind`, which `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import logging
import re
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, Flag
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader

from danling.checkpoints.errors import CheckpointMismatch, restoring
from danling.checkpoints.payload import DICTS, LISTS
from danling.data.randomness import Generators, generator_state, is_generator, set_generator_state
from danling.utils.secrets import names_secret
from danling.utils.tensors import canonical_name, is_plain_tensor, is_sharded, local_part

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

REMEMBERED_BYTES = 2**26
"""Most bytes of attributes, in sum, that an update copies, so that it can be computed again."""
COMPARED_BYTES = 2**30
"""Most bytes of attributes to compare, in sum; a message names the others, unless the class lists them in `saved` or `not_saved`."""
MISSING = object()
DELETED: Mapping[str, str] = {"kind": "deleted"}
"""What is saved of an attribute that the program set and training deleted."""

_NUMBERS = (type(None), bool, int, float)
_SCALARS = (*_NUMBERS, str)
_CONSTANTS = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, Enum, PurePath),
    *(torch.dtype, torch.device, logging.Logger, re.Pattern, range, slice, property, functools.partial),
)
"""What a program makes anew: left to it, also within objects."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, io.IOBase)
"""What belongs to a process, as open files do: left to the program, and not named."""
_FACTORIES: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple, deque)
}
_PLACE = re.compile(r"(^|_)(dir|directory|folder|path|file|filename|root|url|uri)$")
_BYTES = ("bytes", "bytearray")
_DEPTH = 3
"""How deep objects within objects are saved."""
_MOST_OBJECTS = 10_000
"""Objects that are looked at in one look."""
_MOST_NAMED = 20
"""Attributes that one line of the log names."""
_HEAP_TYPE = 1 << 9
"""The flag of CPython's types that are made by `class`."""
_OF_MODULE = frozenset(vars(nn.Module()))

Key = tuple[str, str]
"""A section of a checkpoint, and a name in it."""


# What there is


def _declared(runner: BaseRunner, what: str) -> set[str]:
    """Return the names in `saved` or `not_saved` of the runner's class and its bases."""
    return {name for kind in type(runner).__mro__ for name in vars(kind).get(what, ())}


def _own(runner: BaseRunner) -> dict[str, object]:
    """Return the attributes of the user's, those of the class among them."""
    left_out = {*runner.library_names, *_declared(runner, "not_saved"), "saved", "not_saved"}
    of_class = {
        name: value
        for kind in reversed(type(runner).__mro__)
        if not kind.__module__.startswith("danling.")
        for name, value in vars(kind).items()
        if not name.startswith("__") and isinstance(value, (list, dict, set))
    }
    return {name: value for name, value in {**of_class, **vars(runner)}.items() if name not in left_out}


def _put_nothing_back(chosen: Collection[str] | None = None) -> None:
    """What `remember` returns where no attribute is remembered."""


def _changeable(runner: BaseRunner) -> dict[str, object]:
    """Return what a step may change: the attributes of the user's, and the objects and callables in `metrics`."""
    metrics = vars(runner).get("metrics")
    named = (
        metrics.items() if isinstance(metrics, (Mapping, nn.ModuleDict)) else [] if metrics is None else [("", metrics)]
    )
    return {**_own(runner), **{f"metrics[{name!r}]" if name else "metrics": metric for name, metric in named}}


def _modules(runner: BaseRunner) -> list[tuple[str, nn.Module]]:
    """Return model and criterion, with what the names of their tensors begin with."""
    model = runner.unwrapped_model if isinstance(runner.model, nn.Module) else None
    return [(at, each) for at, each in (("", model), ("criterion.", runner.criterion)) if isinstance(each, nn.Module)]


def _parameters(runner: BaseRunner) -> dict[str, nn.Parameter]:
    return {
        f"{at}{canonical_name(name)}": parameter
        for at, module in _modules(runner)
        for name, parameter in module.named_parameters()
    }


def _buffers(runner: BaseRunner) -> dict[str, tuple[nn.Module, str]]:
    """Return where the buffers that are not persistent are, by name."""
    return {
        f"{at}{canonical_name(f'{prefix}.{name}'.strip('.'))}": (part, name)
        for at, module in _modules(runner)
        for prefix, part in module.named_modules()
        for name in sorted(part._non_persistent_buffers_set & part._buffers.keys())
    }


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a component is made of: the entries of a mapping, the optimizers of several, the schedules of a sequence."""
    if isinstance(value, Mapping):
        yield from ((str(name), each) for name, each in value.items())
    if isinstance(value, (Optimizer, LRScheduler)) or hasattr(value, "param_groups"):
        for name in ("optimizers", "schedulers", "_schedulers", "optimizer", "scheduler", "inner", "base_optimizer"):
            within = getattr(value, name, None)
            for number, each in enumerate(within if isinstance(within, (list, tuple)) else [within]):
                if isinstance(each, (Optimizer, LRScheduler)):
                    yield f"{name}[{number}]", each
                    yield from _parts_of(each)


# Encoding


@dataclass
class Entry:
    """An encoded value.

    Attributes:
        node: The value.
        digest: Its digest; values that are tied to it count too.
        left: The parts that are left out, by path, each with a value that tells whether it has changed, or `None`.
        fixed: The constants within objects, by path.
        listed: The parts that are left out since their type has no encoding, by path, each with what it is.
        needs: The classes of the objects that a restore needs, by path.
        size: Bytes.
    """

    node: Any = MISSING
    digest: bytes = b""
    left: dict[str, object] = field(default_factory=dict)
    fixed: dict[str, object] = field(default_factory=dict)
    listed: dict[str, str] = field(default_factory=dict)
    needs: dict[str, str] = field(default_factory=dict)
    size: int = 0


class Look:
    """Encoded values at one moment. An object that was met before is encoded once, and then named by its path.

    Attributes:
        entries: The values, by section and name.
        objects: Objects that were met, or are saved elsewhere, by path.
        unseen: Parts that are neither compared nor saved, by path, and why.
        members: Names of the attributes of objects, by path.
    """

    def __init__(
        self,
        runner: BaseRunner,
        begun: Mapping[str, list[str]] | None = None,
        *,
        paths_of: Look | None = None,
        with_metrics: bool = False,
    ) -> None:
        self._paths_of, self._with_metrics = paths_of, with_metrics
        self.entries: dict[Key, Entry] = {}
        self.objects: dict[str, object] = {}
        self.unseen: dict[str, str] = {}
        self.members: dict[str, list[str]] = {}
        self._begun = begun or {}
        self._runner = runner
        self.secret_keys = runner.config.secret_keys or ()
        self._encoded: dict[str, Any] = {}
        self._entry = Entry()
        self._depth = self._objects = 0
        self._hides = self._is_declared = False

    @classmethod
    def at_all(cls, runner: BaseRunner, begun: Mapping[str, list[str]] | None = None) -> Look:
        """Look at all that is saved where it has changed.

        Args:
            runner: Whose attributes.
            begun: The `members` that the program has set: one that is not there any more was deleted.
        """
        look, compared, declared = cls(runner, begun), 0, _declared(runner, "saved")
        for name, parameter in _parameters(runner).items():
            look.entries["requires_grad", name] = Entry(parameter.requires_grad)
        for name, (part, key) in _buffers(runner).items():
            buffer = part._buffers[key]
            look.entries["buffers", name] = Entry(None if buffer is None else look._tensor(buffer, name))
        for name, value in _own(runner).items():
            entry = look.attribute(name, value, declared=name in declared)
            if compared + entry.size > COMPARED_BYTES and name not in declared:
                look.unseen[name] = f"is not compared beyond {COMPARED_BYTES >> 30} GiB in sum"
            else:
                compared += entry.size
                look.entries["attributes", name] = entry
        for entry in look.entries.values():
            entry.digest = look._digest(entry.node)
        return look

    def attribute(self, name: str, value: object, *, declared: bool = False) -> Entry:
        """Return an attribute without its digest."""
        self._is_declared, self._entry = declared, Entry()
        self._entry.node = self._encode(value, name, name)
        return self._entry

    def digest(self, name: str) -> bytes:
        """Return the digest of an attribute; empty where there is none."""
        return self.entries.get(("attributes", name), Entry()).digest

    @cached_property
    def paths(self) -> dict[object, str]:
        """Paths of the objects that were met or are saved elsewhere, by the key of each object."""
        if self._paths_of is not None:
            known = self._paths_of.paths
            self.objects.update(self._paths_of.objects)
            return dict(known)
        runner, found = self._runner, self.objects
        found["/"] = runner
        for name in runner.library_names & vars(runner).keys():
            if name == "metrics" and self._with_metrics:
                continue
            found[f"/{name}"] = vars(runner)[name]
            found.update((f"/{name}/{part}", each) for part, each in _parts_of(vars(runner)[name]))
        for at, module in _modules(runner):
            found.update((f"/{at}{name}/module", each) for name, each in module.named_modules())
            tensors = [*module.named_parameters(), *module.named_buffers()]
            found.update((f"/{at}{canonical_name(name)}", each) for name, each in tensors)
        return {key: path for path, each in found.items() if (key := key_of(each)) is not None}

    @cached_property
    def _keyed(self) -> set[int]:
        runner = self._runner
        generators = Generators({"datasets": runner.datasets, "dataloaders": runner.dataloaders}).found
        return set(map(id, generators.values()))

    def _encode(self, value: object, path: str, name: str = "") -> object:
        if type(value) in _NUMBERS:
            return value
        key = key_of(value)
        if key is not None:
            if key in self.paths:
                return {"kind": "same", "path": self.paths[key]}
            self.paths[key], self.objects[path] = path, value
        hides, self._hides = self._hides, self._hides or names_secret(name, self.secret_keys)
        node = self._node(value, path, name)
        self._hides = hides
        self._encoded[path] = node
        return node

    def _node(self, value: Any, path: str, name: str = "") -> object:
        own: Any = type(value)
        kind = own.__name__
        if own is str:
            self._entry.size += len(value)
            return self._leave(path) if is_left_out(name, self._hides) else value
        if own is complex:
            return {"kind": "complex", "value": [value.real, value.imag]}
        if own in (bytes, bytearray):
            if self._hides:
                return self._leave(path)
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)
            return {"kind": kind, "value": data}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if own.__module__ == "numpy" and hasattr(value, "tobytes"):
            return self._array(value, path)
        if own in LISTS.values() or (isinstance(value, tuple) and hasattr(own, "_fields")):
            return self._list(value, path)
        if own in DICTS.values():
            return self._dict(value, path)
        if is_generator(value):
            if id(value) in self._keyed:
                return self._leave(path)
            self._entry.needs[path] = kind
            return {"kind": "generator", "class": kind, "state": self._encode(generator_state(value), f"{path}.state")}
        if isinstance(value, Enum) and (member := _member_node(value)) is not None:
            return member
        if isinstance(value, _CONSTANTS):
            if self._depth:
                self._entry.fixed[path] = value
            return self._leave(path, None if self._depth else value)
        if isinstance(value, _LOCKS):
            return self._leave(path)
        is_stateful = callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None))
        if not (self._is_declared and is_stateful):
            is_lazy = hasattr(own, "__next__") and not (is_stateful or isinstance(value, io.IOBase))
            if is_lazy or isinstance(value, DataLoader):
                self.unseen[path] = "is an iterator or a loader, whose position is not saved without `state_dict`"
                return self._leave(path, kind)
            if isinstance(value, nn.Module) and {p.requires_grad for p in value.parameters()} == {False}:
                self.unseen[path] = "is a module without trainable parameters, which is not compared"
                return self._leave(path)
        if is_stateful:
            return self._stateful(value, path)
        if isinstance(value, (*LISTS.values(), *DICTS.values())):
            # Of a class of the user's, which may hold more.
            items: Any = value
            items = self._items(items if isinstance(value, dict) else dict(enumerate(items)), path)
            return self._leave_all(path, {"items": items}, f"a {kind}, a class of containers")
        return self._object(value, path)

    def _leave(self, path: str, seen: object = None, what: str = "") -> dict[str, str]:
        """Leave out a value; `what` names one that the program may change in place, and whose type has no encoding."""
        self._entry.left[path] = seen
        if what:
            self._entry.listed[path] = what
        return {"kind": "left"}

    def _leave_all(self, path: str, node: object, what: str) -> dict[str, str]:
        """Leave out a value with its parts, which are encoded where they are met again."""
        digest, within = self._digest(node), (f"{path}.", f"{path}[")
        entry = self._entry
        seen = {name: each for name, each in entry.left.items() if name.startswith(within) and each is not None}
        for found in (entry.left, entry.fixed, entry.listed, entry.needs):
            for name in [name for name in found if name.startswith(within)]:
                del found[name]
        for key in [key for key, name in self.paths.items() if name.startswith(within)]:
            del self.paths[key]
        return self._leave(path, (digest, seen), what)

    def _tensor(self, value: Any, path: str) -> object:
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            version = 0 if value.is_inference() else value._version
            return self._leave(path, (id(value), version), "a tensor that is not strided")
        if type(value) not in (Tensor, nn.Parameter) and not is_sharded(value):
            if not is_plain_tensor(value):
                return self._leave(
                    path, id(value), f"a {type(value).__name__}, which has more than the values of a tensor"
                )
            self._entry.needs[path] = type(value).__name__
        local = local_part(value.detach())
        self._entry.size += local.numel() * local.element_size()
        if is_sharded(value):
            self._entry.needs[path] = "DTensor"
            return {"kind": "shard", "value": local}
        if path in self._entry.needs:
            # As a plain tensor: a safe reader does not know the class, which the program's own tensor has.
            node = {"kind": "tensor", "device": local.device.type, "value": local.as_subclass(Tensor)}
            return {**node, "class": self._entry.needs[path]}
        return local if local.device.type == "cpu" else {"kind": "tensor", "device": local.device.type, "value": local}

    def _array(self, value: Any, path: str) -> object:
        import numpy

        if value.dtype.kind not in "biufcmMSU":
            return self._leave(path, (id(value), value.shape), f"an array of {value.dtype}")
        # torch warns of arrays that cannot be written, so these are copied.
        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        data = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        self._entry.size += data.numel()
        kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
        return {"kind": kind, "dtype": value.dtype.str, "shape": list(value.shape), "value": data}

    def _list(self, value: Any, path: str) -> object:
        node: dict[str, Any] = {"kind": type(value).__name__}
        if isinstance(value, (set, frozenset)):
            members = [self._key(item) for item in value]
            if MISSING in members:
                odd = next(item for item, member in zip(value, members) if member is MISSING)
                return self._leave(path, (id(value), len(value)), f"a {type(value).__name__} of {type(odd).__name__}")
            # None of them has a tensor, and the digest needs an order.
            return {**node, "items": sorted(members, key=lambda item: (type(item).__name__, str(item)))}
        if isinstance(value, deque):
            node["maxlen"] = value.maxlen
        if hasattr(value, "_fields"):
            node["kind"], self._entry.needs[path] = "namedtuple", type(value).__name__
        return {**node, "items": self._items(dict(enumerate(value)), path)}

    def _dict(self, value: Any, path: str) -> object:
        keys = [self._key(key) for key in value]
        if MISSING in keys:
            odd = next(key for key, node in zip(value, keys) if node is MISSING)
            what = f"a {type(value).__name__} by {type(odd).__name__}"
            return self._leave(path, (id(value), len(value)), what)
        node: dict[str, Any] = {"kind": type(value).__name__, "keys": keys}
        if isinstance(value, defaultdict):
            node["factory"] = getattr(value.default_factory, "__name__", None)
            if _FACTORIES.get(node["factory"]) is not value.default_factory:
                self._entry.needs[path] = "defaultdict"
        return {**node, "items": self._items(value, path)}

    def _key(self, key: Any) -> Any:
        """Return a key of a dictionary, or an item of a set, as plain values; `MISSING` where it has no encoding."""
        own = type(key)
        if own in _SCALARS:
            return key
        if own in (tuple, frozenset):
            parts = [self._key(part) for part in key]
            if own is frozenset:
                parts.sort(key=lambda part: (type(part).__name__, str(part)))
            return MISSING if MISSING in parts else {"kind": own.__name__, "items": parts}
        if own is bytes:
            return {"kind": "bytes", "items": list(key)}
        if isinstance(key, Enum):
            return MISSING if (node := _member_node(key)) is None else node
        if own.__module__ == "numpy" and getattr(getattr(key, "dtype", None), "kind", "") in ("b", "i", "u", "f"):
            return {"kind": "scalar", "dtype": key.dtype.str, "item": key.item()}
        # Parameters and modules are named: the program has them already.
        path = self.paths.get(key_of(key), "") if isinstance(key, (Tensor, nn.Module)) else ""
        return {"kind": "same", "path": path} if path.startswith("/") else MISSING

    def _items(self, values: Mapping[Any, Any], path: str, form: str | None = None) -> object:
        """Return a list where all values are plain, else a mapping by number: a sharded checkpoint takes mappings apart, but no lists."""
        self._entry.size += 8 * len(values)
        items = [
            self._encode(
                value,
                _path_of_item(path, key, number) if form is None else form.format(path, key),
                key if type(key) is str else "",
            )
            for number, (key, value) in enumerate(values.items())
        ]
        is_flat = not any(isinstance(item, (dict, Tensor)) for item in items)
        return items if is_flat else {str(number): item for number, item in enumerate(items)}

    def _stateful(self, value: Any, path: str) -> object:
        kind = type(value).__name__
        try:
            state = value.state_dict()
        except Exception as error:
            reason = f"{kind}.state_dict() raises {type(error).__name__}"
            return self._leave(path, reason, f"a {kind} whose state_dict() raises {type(error).__name__}")
        self.objects[f"{path}/state"] = state  # kept, so that no id in it is given to another object
        others, self._entry.left = self._entry.left, {}
        listed = dict(self._entry.listed)
        # Nothing else is tied to a state, since its object may take a copy of it; what is saved elsewhere is not saved again.
        paths, self.paths = self.paths, {key: saved for key, saved in self.paths.items() if saved.startswith("/")}
        node = {"kind": "stateful", "class": kind, "state": self._node(state, path)}
        self.paths = paths
        if self._entry.left:
            # A part of a state cannot be loaded.
            part = next(iter(self._entry.left))
            self._entry.left = others
            return self._leave_all(path, node, f"a {kind}, whose state_dict() has {part.removeprefix(path)}")
        self._entry.needs[path] = kind
        if isinstance(value, nn.Module):
            more = {name: getattr(holder, key) for name, (holder, key) in _beside_state(value, state).items()}
            # Objects among them are not followed: their modules make them.
            depth, self._depth = self._depth, _DEPTH
            node["more"] = self._encode(more, f"{path}.more")
            self._depth = depth
        self._entry.left, self._entry.listed = others, listed
        return node

    def _object(self, value: object, path: str) -> object:
        kind = type(value).__name__
        own: Any = type(value)
        if not _is_all_attributes(own):
            return self._leave(path, id(value), "" if _is_data_or_tokenizer(value) else f"a {kind}")
        if self._depth >= _DEPTH or self._objects >= _MOST_OBJECTS:
            bound = f"deeper than {_DEPTH} objects" if self._depth >= _DEPTH else f"after {_MOST_OBJECTS:,} objects"
            return self._leave(path, id(value), f"a {kind}, {bound}")
        held = _attributes_of(value)
        others, self._entry.left = self._entry.left, {}
        self._depth += 1
        self._objects += 1
        items = self._items(held, path, form="{}.{}")
        self._depth -= 1
        node = {"kind": "object", "class": kind, "keys": list(held), "items": items}
        self.members[path] = list(held)
        deleted = [name for name in self._begun.get(path, ()) if name not in held]
        if deleted:
            node["deleted"] = deleted
        changing = [name for name, seen in self._entry.left.items() if seen is not None]
        self._entry.left = {**others, **self._entry.left}
        if changing:
            what = self._entry.listed.get(changing[0], "a value without an encoding")
            part = changing[0].removeprefix(path)
            if ", in which " in what:  # the innermost part says most
                _, _, inner = what.partition(", in which ")
                part, what = f"{part}{inner.partition(' is ')[0]}", inner.partition(" is ")[2]
            what = f"a {kind}, in which {part} is {what}"
            return self._leave_all(path, node, "" if _is_data_or_tokenizer(value) else what)
        self._entry.needs[path] = kind
        return node

    def _digest(self, node: object) -> bytes:
        if not isinstance(node, (dict, Tensor)):
            return f"{type(node).__name__} {node!r}".encode()
        total = hashlib.sha1(usedforsecurity=False)
        self._feed(total, node, set())
        return total.digest()

    def _feed(self, total: Any, node: Any, seen: set[str]) -> None:
        if isinstance(node, Tensor):
            total.update(f"{node.dtype} {tuple(node.shape)}".encode())
            bits = node.detach().contiguous().cpu().reshape(-1).resolve_conj().resolve_neg().view(torch.uint8)
            total.update(memoryview(bits.numpy()))  # type: ignore[arg-type]
        elif not isinstance(node, dict):
            total.update(f"{type(node).__name__} {node!r}".encode())
        elif node.get("kind") == "same" and node["path"] not in seen and node["path"] in self._encoded:
            seen.add(node["path"])
            self._feed(total, self._encoded[node["path"]], seen)
        else:
            for key, item in node.items():
                total.update(key.encode())
                self._feed(total, item, seen)


def is_left_out(name: str, is_secret: bool) -> bool:
    """Whether a text under a name is neither saved nor restored: the name is that of a place, or something above it names a secret."""
    last = name.rpartition(".")[2].lower().replace("-", "_")
    return is_secret or bool(_PLACE.search(last))


def _is_code(kind: type[Any], name: str) -> bool:
    """Whether a name of a class is a method, a property or a class, which no checkpoint replaces."""
    value = getattr(kind, name, None)
    return callable(value) or hasattr(value, "__set__")


def _path_of_item(path: str, key: object, number: int) -> str:
    """Return the path of an item of a container: by its key where that is plain, else by its place."""
    is_plain = all(type(part) in _SCALARS for part in (key if type(key) is tuple else (key,)))
    return f"{path}[{key!r}]" if is_plain else f"{path}[#{number}]"


def _is_data_or_tokenizer(value: object) -> bool:
    """Whether a value is a dataset or a tokenizer, which a program makes anew: no line names it."""
    names = {kind.__name__ for kind in type(value).__mro__}
    return "Dataset" in names or any("Tokenizer" in name for name in names)


def _slots_of(kind: type[Any]) -> list[str]:
    """Return the names in `__slots__` of a class and its bases, as they are in its instances."""
    found = []
    for base in reversed(kind.__mro__):
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


@functools.lru_cache(maxsize=1024)
def _is_all_attributes(kind: type[Any]) -> bool:
    """Whether objects of a class have nothing but attributes: a class that is written in C may have more."""
    if kind is types.SimpleNamespace:
        return True
    slots = _slots_of(kind)
    of_python = all(base is object or base.__flags__ & _HEAP_TYPE for base in kind.__mro__)
    # The attributes and the weak references of an object may be in front of it.
    most = object.__basicsize__ + 8 * (2 + len(slots))
    has_attributes = bool(slots) or kind.__dictoffset__ != 0
    return of_python and has_attributes and kind.__basicsize__ <= most


def _attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _member_node(value: Enum) -> dict[str, Any] | None:
    """Return the encoding of a member of an enumeration; `None` where its class cannot be found again."""
    kind = type(value)
    node: dict[str, Any] = {"kind": "enum", "class": f"{kind.__module__}:{kind.__qualname__}"}
    if _enumeration(node["class"]) is not kind:
        return None
    if value.name in kind.__members__:
        return {**node, "name": value.name}
    return {**node, "value": value.value} if isinstance(value, Flag) else None


def _enumeration(name: str) -> Any:
    """Return an enumeration of a module that the program has loaded; no file decides on imports."""
    module, _, path = name.partition(":")
    found = vars(sys.modules[module]).get(path) if module in sys.modules else None
    return found if isinstance(found, type) and issubclass(found, Enum) else None


def _member(node: Mapping[str, Any]) -> Enum:
    kind = _enumeration(node["class"])
    if kind is not None and node.get("name") in kind.__members__:
        member: Enum = kind[node["name"]]
        return member
    if kind is not None and "value" in node and issubclass(kind, Flag):
        flags: Enum = kind(node["value"])
        return flags
    raise CannotRestore(f"a member {node.get('name', '')} of the enumeration {node['class']}")


def key_of(value: object) -> object:
    """Return what two names of one value have in common; `None` for values that cannot be changed in place."""
    if value is MISSING or isinstance(value, (*_SCALARS, tuple, frozenset, bytes, complex, *_CONSTANTS)):
        return None
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and not value.is_quantized:
        local = local_part(value)
        if local.numel():
            return local.data_ptr(), local.dtype, local.shape, local.stride()
    return id(value)


def _beside_state(module: nn.Module, state: Mapping[str, object]) -> dict[str, tuple[nn.Module, str]]:
    """Return buffers that are not in the state of a module, and plain attributes, in which metrics of torchmetrics keep their sums."""
    found = {}
    for prefix, part in module.named_modules():
        own = [key for key in vars(part) if key not in _OF_MODULE]
        unsaved = [key for key in part._buffers if f"{prefix}.{key}".strip(".") not in state]
        found.update({f"{prefix}.{key}".strip("."): (part, key) for key in [*own, *unsaved]})
    return found


# Decoding


class CannotRestore(Exception):
    """What was saved needs an object that the program has not made."""


class Decoder:
    """Puts encoded values back, into the objects of a look where they fit."""

    def __init__(self, look: Look, *, exact: bool = False) -> None:
        self._exact = exact
        """Whether attributes of objects that the values lack are removed."""
        # An object takes one value: where two values were apart when they were saved, the second one gets its own object.
        self._taken = {key for key, path in look.paths.items() if path.startswith("/")}
        self._live = look.objects
        self._restored: dict[str, object] = {}
        self._secret_keys = look.secret_keys
        self._hides = False

    def decode(self, node: object, current: object, path: str, name: str = "") -> Any:
        """Return the value of a node, which is `current` where that could take it; `MISSING` where it is left to the program.

        What is never saved is never restored: a text under the name of a secret or of a place is left to the program.
        """
        hides, self._hides = self._hides, self._hides or names_secret(name, self._secret_keys)
        try:
            is_text = isinstance(node, str) and self.is_of_program(name, current, node)
            is_bytes = isinstance(node, dict) and node["kind"] in _BYTES and self._hides
            return current if is_text or is_bytes else self._decode(node, current, path)
        finally:
            self._hides = hides

    def is_of_program(self, name: str, *values: object) -> bool:
        """Whether one of the values is a path, or the text of a secret or a place by its name."""
        is_secret = self._hides or names_secret(name, self._secret_keys)
        return any(isinstance(value, PurePath) for value in values) or (
            any(isinstance(value, str) for value in values) and is_left_out(name, is_secret)
        )

    def _decode(self, node: object, current: object, path: str) -> Any:
        if not isinstance(node, (dict, Tensor)):
            return node
        if isinstance(node, dict) and node["kind"] == "left":
            return current
        if isinstance(node, dict) and node["kind"] == "same":
            live = self._live.get(node["path"], MISSING)
            is_there = live is not MISSING and key_of(live) == key_of(current)
            return current if is_there else self._restored.get(node["path"], live)
        key = key_of(current)
        if key is not None and key in self._taken:
            current = MISSING
        value = self._decoded(node, current, path)
        self._taken.add(key_of(value))
        self._restored[path] = value
        return value

    def _decoded(self, node: Any, current: Any, path: str) -> Any:
        kind = "tensor" if isinstance(node, Tensor) else node["kind"]
        if kind in ("tensor", "shard"):
            return decode_tensor(node, current)
        if kind == "complex":
            return complex(*node["value"])
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(node["value"].tolist())
        if kind in ("array", "scalar"):
            return _array_of(node, current)
        if kind == "enum":
            return _member(node)
        if kind in LISTS or kind == "namedtuple":
            return self._list(node, current, path)
        if kind in DICTS:
            return self._dict(node, current, path)
        if type(current).__name__ != node["class"]:
            raise CannotRestore(f"an object of the class {node['class']}")
        if kind == "generator":
            set_generator_state(current, self.decode(node["state"], MISSING, f"{path}.state"))
        elif kind == "object":
            return self._object(node, current, path)
        else:
            self._load(node, current, path)
        return current

    def _object(self, node: Any, current: Any, path: str) -> Any:
        held = _attributes_of(current)
        parameters = getattr(type(current), "__dataclass_params__", None)
        if parameters is not None and parameters.frozen:
            # Another object of its kind: others that refer to this one count on it to stay as it is.
            current = object.__new__(type(current))
            _set_attributes(current, held)
        changed = {}
        for name, item in zip(node["keys"], _items(node)):
            value = self.decode(item, held.get(name, MISSING), f"{path}.{name}", name)
            if value is not MISSING:
                changed[name] = value
        _set_attributes(current, changed)
        for name in held.keys() - set(node["keys"]) if self._exact else ():
            object.__delattr__(current, name)
        for name in node.get("deleted", ()):
            if name in held and not self.is_of_program(name, held[name]):
                object.__delattr__(current, name)
        return current

    def _key(self, node: Any) -> Any:
        """Return the key of a dictionary, or the item of a set, that `Look` encoded."""
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind in ("tuple", "frozenset"):
            return LISTS[kind](self._key(part) for part in node["items"])
        if kind == "bytes":
            return bytes(node["items"])
        if kind == "enum":
            return _member(node)
        if kind == "scalar":
            import numpy

            return numpy.dtype(node["dtype"]).type(node["item"])
        found = self._live.get(node["path"])
        if not isinstance(found, (Tensor, nn.Module)):
            raise CannotRestore(f"a dictionary by parameters or modules, among them {node['path']}")
        return found

    def _list(self, node: Any, current: Any, path: str) -> Any:
        if node["kind"] == "namedtuple" and not hasattr(current, "_fields"):
            raise CannotRestore("a named tuple")
        kind = LISTS.get(node["kind"], type(current))
        there = list(current) if isinstance(current, (list, tuple, deque)) else []
        if kind in (set, frozenset):
            found = [self._key(item) for item in node["items"]]
        else:
            found = [
                self.decode(item, there[n] if n < len(there) else MISSING, f"{path}[{n}]")
                for n, item in enumerate(_items(node))
            ]
        items = [item for item in found if item is not MISSING]
        if hasattr(kind, "_fields"):
            return kind(*items)
        if kind is deque and (type(current) is not deque or current.maxlen != node["maxlen"]):
            return deque(items, node["maxlen"])
        if kind not in (list, deque, set) or type(current) is not kind:
            return kind(items)
        current.clear()
        if isinstance(current, set):
            current.update(items)
        else:
            current.extend(items)
        return current

    def _dict(self, node: Any, current: Any, path: str) -> Any:
        keys = [self._key(key) for key in node["keys"]]
        there = current if isinstance(current, dict) else {}
        found = {}
        for number, (key, item) in enumerate(zip(keys, _items(node))):
            name = key if type(key) is str else ""
            found[key] = self.decode(item, there.get(key, MISSING), _path_of_item(path, key, number), name)
        if type(current).__name__ != node["kind"]:
            current = DICTS[node["kind"]]()
            if node["kind"] == "defaultdict":
                if node.get("factory") not in _FACTORIES:
                    raise CannotRestore("a defaultdict")
                current.default_factory = _FACTORIES[node["factory"]]
        current.clear()
        current.update({key: item for key, item in found.items() if item is not MISSING})
        return current

    def _load(self, node: Any, current: Any, path: str) -> None:
        # A copy: an object may hand out what it has, and empty that before it takes the state. A tensor of a graph cannot be copied so.
        now = current.state_dict()
        inner = (leaf for leaf in tree_leaves(now) if isinstance(leaf, Tensor) and not leaf.is_leaf)
        state = self._decoded(
            node["state"], copy.deepcopy(now, {id(leaf): leaf.detach().clone() for leaf in inner}), path
        )
        current.load_state_dict(state)
        if "more" not in node:
            return
        beside = _beside_state(current, current.state_dict())
        more = dict(zip(node["more"]["keys"], _items(node["more"])))
        for name in more.keys() & beside.keys():
            holder, key = beside[name]
            there = getattr(holder, key)
            value = self.decode(more[name], there, f"{path}.more[{name!r}]", name)
            if value is not there and value is not MISSING:
                setattr(holder, key, value)


def _set_attributes(value: object, attributes: Mapping[str, object]) -> None:
    """Set attributes of an object, also those in slots, without its own `__setattr__`."""
    slots = set(_slots_of(type(value)))
    for name, each in attributes.items():
        if name in slots:
            object.__setattr__(value, name, each)
        else:
            vars(value)[name] = each


def _is_deleted(node: object) -> bool:
    return isinstance(node, dict) and node.get("kind") == DELETED["kind"]


def _items(node: Mapping[str, Any]) -> list[Any]:
    items = node["items"]
    return items if isinstance(items, list) else [items[str(number)] for number in range(len(items))]


@torch.no_grad()
def decode_tensor(node: Any, current: object) -> Tensor:
    """Write a value into a tensor where it fits, else return another one."""
    value: Tensor = node if isinstance(node, Tensor) else node["value"]
    if isinstance(node, dict) and node["kind"] == "shard":
        if not (isinstance(current, Tensor) and is_sharded(current)):
            raise CannotRestore("a tensor divided over the ranks")
        local_part(current).copy_(value)
        return current
    if isinstance(node, dict) and node.get("class", type(current).__name__) != type(current).__name__:
        raise CannotRestore(f"a tensor of the class {node['class']}")
    fits = isinstance(current, Tensor) and (current.shape, current.dtype) == (value.shape, value.dtype)
    if isinstance(current, Tensor) and fits and (0 not in current.stride() or current.numel() < 2):
        current.copy_(value)
        return current
    if isinstance(node, Tensor):
        return value.clone()
    accelerator = torch.accelerator.current_accelerator()
    is_here = accelerator is not None and node.get("device") == accelerator.type
    moved = value.to(node["device"] if is_here else "cpu", copy=True)
    kind: Any = type(current)
    back: Tensor = moved.as_subclass(kind) if "class" in node else moved
    return back


def _array_of(node: Mapping[str, Any], current: object) -> Any:
    import numpy

    bits = node["value"].contiguous().numpy().tobytes()
    array = numpy.frombuffer(bits, dtype=numpy.dtype(node["dtype"])).reshape(node["shape"])
    if node["kind"] == "scalar":
        return array[()]
    fits = isinstance(current, numpy.ndarray) and (current.shape, current.dtype) == (array.shape, array.dtype)
    if isinstance(current, numpy.ndarray) and fits and current.flags.writeable:
        current[...] = array
        return current
    return array.copy()


# A run


class KeptAttributes:
    """Saves the attributes of the user's, `requires_grad` and the buffers that are not persistent, where they have changed.

    An attribute has changed if its digest differs from that before the restore, when the program alone had set it. What a loaded
    checkpoint has stays saved. Values that differ between ranks are saved for each rank.
    """

    def __init__(self, runner: BaseRunner) -> None:
        self._runner = runner
        self._begun: Mapping[Key, Entry] = {}
        self._members: Mapping[str, list[str]] = {}
        self._kept: set[Key] = set()
        self._restored: dict[str, bytes] = {}
        self._named: set[str] = set()
        self._paths: Look | None = None
        """A look that knows the objects of the library, which a small look at each update need not walk over."""
        self._too_large: set[str] = set()
        """Attributes beyond the limit when all were remembered last."""
        self._has_listed = False

    def begin(self) -> None:
        """Remember the values that the program has set. Called before anything is restored."""
        look = Look.at_all(self._runner)
        self._begun, self._members = look.entries, look.members

    def remember(self, names: Collection[str] | None = None) -> Callable[..., None]:
        """Copy the attributes and the objects in `metrics`, up to `REMEMBERED_BYTES`. May be called on one rank.

        Args:
            names: Which ones, for each update again; `None` is all.

        Returns:
            A function that restores them and removes attributes that were set since; given names, it restores those alone.
        """
        runner = self._runner
        kept: dict[str, tuple[Any, object]] = {}
        if names is not None and not names:
            self._too_large = set()
            return _put_nothing_back
        if names is None:
            look, values = Look(runner, with_metrics=True), _changeable(runner)
        else:
            if self._paths is None:
                self._paths = Look(runner, with_metrics=True)
            look = Look(runner, paths_of=self._paths, with_metrics=True)
            values = {name: value for name, value in _changeable(runner).items() if name in names}
        size, self._too_large = 0, set()
        for name, value in values.items():
            entry = look.attribute(name, value)
            if size + entry.size <= REMEMBERED_BYTES:
                size += entry.size
                kept[name] = tree_map_only(Tensor, Tensor.clone, entry.node), value
            else:
                self._too_large.add(name)

        def put_back(chosen: Collection[str] | None = None) -> None:
            decoder = Decoder(look, exact=True)
            for name, (node, value) in kept.items():
                if chosen is not None and name not in chosen:
                    continue
                before = decoder.decode(node, value, name, name)
                is_metric = name == "metrics" or name.startswith("metrics[")
                if not is_metric and before is not MISSING and getattr(runner, name, MISSING) is not before:
                    setattr(runner, name, before)
            for name in _own(runner).keys() - values.keys() if chosen is None else ():
                if name in vars(runner):
                    delattr(runner, name)

        return put_back

    def digests(self) -> dict[str, bytes]:
        """Return a digest of each attribute and object in `metrics`, up to `COMPARED_BYTES` in sum. May be called on one rank."""
        look, size = Look(self._runner, with_metrics=True), 0
        found = {}
        for name, value in _changeable(self._runner).items():
            entry = look.attribute(name, value)
            if size + entry.size <= COMPARED_BYTES and entry.node != {"kind": "left"}:
                size += entry.size
                found[name] = look._digest(entry.node)
        return found

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put attributes and the objects in `metrics` back on exit, and name those that cannot be. May be called on one rank."""
        put_back, large = self.remember(), set(self._too_large)
        before = self._not_copied(large)
        try:
            yield
        finally:
            put_back()
            now = self._not_copied(large)
            self._warn(
                sorted(path for path in before.keys() & now.keys() if before[path] != now[path]),
                f"they have no encoding, or take more than {REMEMBERED_BYTES >> 20} MiB in sum. Set try_evaluation=false, or change them "
                "elsewhere than in evaluate_step",
                about="Changed by the trial of an evaluation, and not put back: ",
            )

    def _not_copied(self, large: Collection[str]) -> dict[str, object]:
        """Return by path what tells whether a value has changed that `remember` leaves out."""
        look, found = Look(self._runner, with_metrics=True), dict[str, object]()
        for name, value in _changeable(self._runner).items():
            entry = look.attribute(name, value)
            found.update({path: seen for path, seen in entry.left.items() if seen is not None})
            if name in large and entry.size <= COMPARED_BYTES:
                found[name] = look._digest(entry.node)
        return found

    def note_put_back(self, names: Collection[str]) -> None:
        """Log which attributes a skipped update puts back, and warn of those that it does not."""
        too_large = sorted(self._too_large.intersection(names))
        put_back = sorted(set(names) - self._too_large)
        if put_back and self._runner.is_main_process:
            logger.info("A skipped update puts back %s.", ", ".join(f"self.{name}" for name in put_back))
        self._warn(
            too_large,
            f"they take more than {REMEMBERED_BYTES >> 20} MiB in sum, and train_step changes them. Make them buffers of the model if a "
            "skipped update must not change them",
            about="Not put back after a skipped update: ",
        )

    # Saving

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the entries of a checkpoint, those alone that are not empty. Called on all ranks."""
        world, now = self._runner.world, self._entries()
        mine, unsavable = self._changed(now)
        self._warn_of_unsaved(
            unsavable,
            "changed since the program set it, and a checkpoint cannot hold it: a resumed run goes on with another one. Make the object in "
            "__init__ and give it `state_dict` and `load_state_dict`, or name the attribute in `not_saved` on the class",
        )
        self._list_without_encoding(now, unsavable)
        keys = sorted(set().union(*world.gather_objects(mine)))
        if not keys:
            return {}
        ranks = world.gather_objects([now[key].digest if key in now else None for key in keys])
        digests = dict(zip(keys, map(set, zip(*ranks))))
        differing = [key for key in keys if len(digests[key]) > 1]
        nodes = []
        if differing:
            mine_of_these = {key: now[key].node for key in differing if key in now}
            nodes = world.gather_objects(tree_map_only(Tensor, Tensor.cpu, mine_of_these))
        found: dict[str, dict[str, Any]] = {}
        for key in keys:
            values = {str(rank): each[key] for rank, each in enumerate(nodes) if key in each}
            if key not in differing:
                entries = {"value": now[key].node}
            elif key[0] != "attributes" and len(digests[key] - {None}) == 1:
                # Parts of a pipeline have tensors of other names: what those have that have it is equal.
                entries = {"value": next(iter(values.values()))}
            else:
                entries = {"of": world.size, "ranks": values}
            found.setdefault(key[0], {})[key[1]] = entries
        return found

    def _changed(self, now: Mapping[Key, Entry]) -> tuple[set[Key], list[str]]:
        """Return what is saved since it has changed, and the paths of what has changed and cannot be saved."""
        kept = self._kept | {("attributes", name) for name in _declared(self._runner, "saved")}
        mine, unsavable = set[Key](), list[str]()
        for key, entry in now.items():
            begun, left = self._begun.get(key, Entry()), entry.left.items()
            unsavable += [path for path, seen in left if seen is not None and seen != begun.left.get(path)]
            replaced = (path for path, value in entry.fixed.items() if begun.fixed.get(path, value) != value)
            unsavable += [path for path in replaced if entry.node != {"kind": "left"}]
            if (entry.digest != begun.digest or key in kept) and entry.node != {"kind": "left"}:
                # A restore needs the objects that `__init__` made.
                if entry.needs.items() <= begun.needs.items():
                    mine.add(key)
                else:
                    unsavable.append(key[1])
        return mine, unsavable

    # Another replica group

    def of_rank(self) -> dict[str, dict[str, Any]]:
        """Return what this rank would save, and all of `requires_grad` and buffers, for a rank that may have changed others.

        No communication: may be called on one rank.
        """
        now = self._entries()
        mine, _ = self._changed(now)
        found: dict[str, dict[str, Any]] = {}
        for key, entry in now.items():
            if (key in mine or key[0] != "attributes") and entry.node != {"kind": "left"}:
                found.setdefault(key[0], {})[key[1]] = {"value": tree_map_only(Tensor, Tensor.clone, entry.node)}
        return found

    def take_over(self, section: str, payload: Mapping[str, Any]) -> None:
        """Restore a section of what `of_rank` returned on a rank of another group."""
        kept = set(self._kept)
        self.load(section, payload)
        # It is in the middle of a training: what has changed is saved as ever, and what is set from here on is no surprise.
        self._kept, self._restored = kept, {}

    def _list_without_encoding(self, now: Mapping[Key, Entry], named: Collection[str]) -> None:
        """Name once what no checkpoint of this run contains, less what a warning has named."""
        listed = {path: what for entry in now.values() for path, what in entry.listed.items() if path not in named}
        if self._has_listed or not listed:
            return
        self._has_listed = True
        shown = [f"self.{path} ({what})" for path, what in list(listed.items())[:_MOST_NAMED]]
        if len(listed) > _MOST_NAMED:
            shown.append(f"{len(listed) - _MOST_NAMED} more")
        if self._runner.is_main_process:
            logger.info(
                "No checkpoint of this run contains the following attributes, since their types have no encoding: %s. A resumed run has "
                "them as the program sets them. Give the class `state_dict` and `load_state_dict` to have one saved, or name the attribute "
                "in `not_saved`.",
                ", ".join(shown),
            )

    def _entries(self) -> dict[Key, Entry]:
        """Return all that is saved where it has changed, with what the program has set and is not there any more."""
        runner = self._runner
        found = Look.at_all(runner, self._members).entries
        here = {("attributes", name) for name in _own(runner)} | {("buffers", name) for name in _buffers(runner)}
        for key in self._begun.keys() - here:
            if key[0] in ("attributes", "buffers"):
                found[key] = Entry(DELETED, DELETED["kind"].encode())
        return found

    def before_training(self) -> None:
        """Warn of attributes that no checkpoint will contain, or that were set anew after a restore. May be called on one rank."""
        look, restored = Look.at_all(self._runner), self._restored
        self._restored = {}
        self._warn(
            [name for name, digest in restored.items() if look.digest(name) != digest],
            "set anew after the checkpoint was restored; the run goes on with the new value",
        )
        for path, reason in look.unseen.items():
            self._warn_of_unsaved(
                [path],
                f"{reason}. Name the attribute in `saved` on the class where training changes it, such as saved = ('teacher',), else in "
                "`not_saved`",
            )

    def _warn(self, names: Collection[str], what: str, *, about: str = "") -> None:
        if names and self._runner.is_main_process:
            logger.warning("%s%s: %s.", about, ", ".join(f"self.{name}" for name in names), what)

    def _warn_of_unsaved(self, paths: Iterable[str], why: str) -> None:
        names = [path for path in paths if path not in self._named]
        self._named.update(names)
        self._warn(names, why, about="Not saved: ")

    # Loading

    def load(self, section: str, payload: Mapping[str, Any]) -> None:
        """Restore the section `requires_grad`, `buffers` or `attributes` in place. Called on all ranks."""
        stored = {name: self._mine(section, name, entry) for name, entry in (payload.get(section) or {}).items()}
        stored = {name: node for name, node in stored.items() if node is not MISSING}
        self._kept |= {(section, name) for name in stored}
        runner = self._runner
        if section == "requires_grad":
            parameters = _parameters(runner)
            for name in stored.keys() & parameters.keys():
                parameters[name].requires_grad_(bool(stored[name]))
        elif section == "buffers":
            buffers = _buffers(runner)
            for name in stored.keys() & buffers.keys():
                part, key = buffers[name]
                if _is_deleted(stored[name]):
                    del part._buffers[key]
                elif stored[name] is None:
                    part._buffers[key] = None
                else:
                    part._buffers[key] = decode_tensor(stored[name], part._buffers[key])
        else:
            self._load_attributes(stored)

    def _load_attributes(self, stored: Mapping[str, object]) -> None:
        runner, own, before = self._runner, _own(self._runner), Look.at_all(self._runner)
        begun = {name: self._begun.get(("attributes", name), Entry()).digest for name in own.keys() - stored.keys()}
        self._warn(
            sorted(name for name, digest in begun.items() if before.digest(name) not in (b"", digest)),
            "changed since the program set it; the checkpoint is of before that and has no value",
        )
        if not stored:
            return
        decoder = Decoder(before)
        left_out = {*runner.library_names, *_declared(runner, "not_saved")}
        for name, node in stored.items():
            if name in left_out or (name not in own and _is_code(type(runner), name)):
                continue
            current = own.get(name, MISSING)
            if _is_deleted(node):
                is_kept = isinstance(current, (str, PurePath)) and is_left_out(
                    name, names_secret(name, before.secret_keys)
                )
                if name in vars(runner) and not is_kept:
                    delattr(runner, name)
                continue
            with restoring(f"self.{name}", f"attributes.{name}"):
                try:
                    value = decoder.decode(node, current, name, name)
                except CannotRestore as error:
                    raise CheckpointMismatch(
                        f"Expected self.{name} to be {error} when the checkpoint is restored. Received: {type(current).__name__}. Make it "
                        f"in __init__, or add 'attributes.{name}' to checkpoint.exclude_from_loading."
                    ) from None
                if value is not MISSING and value is not current:
                    setattr(runner, name, value)
        now = Look.at_all(runner)
        self._restored = {name: now.digest(name) for name in stored}

    def _mine(self, section: str, name: str, entry: Mapping[str, Any]) -> Any:
        if "value" in entry:
            return entry["value"]
        world = self._runner.world
        if entry["of"] != world.size:
            raise CheckpointMismatch(
                f"Expected {entry['of']} processes: the checkpoint has a value of self.{name} for each of them. Received: {world.size}. "
                f"Resume on as many, or add '{section}.{name}' to checkpoint.exclude_from_loading, which keeps the value of the program."
            )
        return entry["ranks"].get(str(world.rank), MISSING)
