"""Values that users keep on a runner, as tensors and plain values that `torch.load(weights_only=True)` reads, and back in place."""

from __future__ import annotations

import hashlib
import io
import logging
import random
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from danling.data.generators import generator_state, is_generator, set_generator_state
from danling.utils.secrets import names_secret
from danling.utils.tensors import is_sharded, local_part

_NUMBERS = (type(None), bool, int, float)
_SCALARS = (*_NUMBERS, str)
_CONSTANTS = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, Enum, PurePath),
    *(torch.dtype, torch.device, logging.Logger, re.Pattern, range, slice, property),
)
"""What a program makes anew and no training changes: left to the program, also within objects."""
_LISTS: tuple[type[Any], ...] = (list, tuple, deque, set, frozenset, torch.Size)
_DICTS: tuple[type[Any], ...] = (dict, OrderedDict, defaultdict, Counter)
_FACTORIES: tuple[type[Any], ...] = (int, float, str, bool, list, dict, set, tuple, deque)
_PLACE = re.compile(r"(^|_)(dir|directory|folder|path|file|filename|root|url|uri)$")
_LOOKED_AT = 3
"""How deep objects within objects are compared. Of the first one alone the attributes are saved."""
_OF_MODULE = frozenset(vars(nn.Module()))

MISSING = object()


class CannotRestore(Exception):
    """What was saved needs an object that the program has not made."""


class Encoder:
    """Encodes values one after the other. What was met before is encoded once, and then named by its path.

    Attributes:
        objects: Objects that were met or are saved elsewhere, by path.
        needs: Classes of the objects that a restore needs, by path, of the value that is encoded.
        left: Parts left out, by path, each with a value that tells whether it has changed, or `None`.
        unseen: Parts that are neither compared nor saved, by path, and why.
        size: Bytes of it.

    Args:
        components: Returns the values that are saved elsewhere, by path.
        keyed: Returns the ids of generators that are seeded by keys.
        secret_keys: Keys of the configuration that name secrets.
    """

    def __init__(
        self,
        components: Callable[[], Mapping[str, object]] = dict,
        *,
        keyed: Callable[[], Collection[int]] = set,
        secret_keys: Collection[str] = (),
    ) -> None:
        self.components = components
        self._keyed = keyed
        self._secret_keys = secret_keys
        self._paths: dict[object, str] | None = None
        self._nodes: dict[str, Any] = {}
        self._depth = 0
        self._hides = self._declared = False
        self.objects: dict[str, object] = {}
        self.needs: dict[str, str] = {}
        self.left: dict[str, object] = {}
        self.unseen: dict[str, str] = {}
        self.size = 0

    def begin(self, *, declared: bool) -> None:
        """Begin with another attribute."""
        self._declared, self.size, self.left, self.needs = declared, 0, {}, {}

    def paths(self) -> dict[object, str]:
        """Return the paths of the objects that were met or are saved elsewhere, by the key of each object."""
        if self._paths is None:
            self.objects.update(self.components())
            self._paths = {key: path for path, each in self.objects.items() if (key := key_of(each)) is not None}
        return self._paths

    def encode(self, value: Any, path: str, name: str = "") -> Any:
        """Return a value as tensors, plain values, and mappings of them with an entry `kind`."""
        outer, self._hides = self._hides, self._hides or names_secret(name, self._secret_keys)
        try:
            if type(value) is str:
                self.size += len(value)
                return self._leave(path, None) if self._hides or _PLACE.search(name) else value
            if type(value) in _SCALARS:
                return value
            key = key_of(value)
            if key is not None:
                paths = self.paths()
                if key in paths:
                    return {"kind": "same", "path": paths[key]}
                paths[key], self.objects[path] = path, value
            self._nodes[path] = self._encode(value, path)
            return self._nodes[path]
        finally:
            self._hides = outer

    def _encode(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if type(value) in (bytes, bytearray):
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.zeros(0, dtype=torch.uint8)
            return {"kind": type(value).__name__, "value": data}
        if type(value) is complex:
            return {"kind": "complex", "value": [value.real, value.imag]}
        if _is_array(value):
            return self._array(value, path)
        if type(value) in _LISTS or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return self._list(value, path)
        if type(value) in _DICTS:
            return self._dict(value, path)
        own: Any = type(value)
        kind = own.__name__
        if is_generator(value):
            if id(value) in self._keyed():
                return self._leave(path, None)
            self.needs[path] = kind
            return {"kind": "generator", "class": kind, "state": self.encode(generator_state(value), f"{path}.state")}
        if isinstance(value, _CONSTANTS):
            return self._leave(path, None if self._depth else _name_of(value))
        is_stateful = callable(getattr(own, "state_dict", None)) and callable(getattr(own, "load_state_dict", None))
        if not (self._declared and is_stateful):
            is_lazy = hasattr(own, "__next__") and not (is_stateful or isinstance(value, io.IOBase))
            if is_lazy or isinstance(value, DataLoader):
                self.unseen[path] = "is an iterator or a loader, whose position is not saved without `state_dict`"
                return self._leave(path, kind)
            if isinstance(value, nn.Module) and {p.requires_grad for p in value.parameters()} == {False}:
                self.unseen[path] = "is a module without trainable parameters, which is not compared"
                return self._leave(path, None)
        if is_stateful:
            return self._stateful(value, path)
        if isinstance(value, (*_LISTS, *_DICTS)):
            # Of a class of the user's, which may hold more.
            items: Any = value
            node, _ = self._apart(dict(items) if isinstance(value, dict) else list(items), path)
            return self._leave(path, node)
        return self._object(value, path)

    def _leave(self, path: str, seen: object) -> dict[str, str]:
        self.left[path] = seen
        return {"kind": "left"}

    def _apart(self, value: Any, path: str) -> tuple[bytes, Any]:
        """Return the digest of a value to which nothing else is tied, and its node; `None` where something of it is left out."""
        encoder = Encoder(keyed=self._keyed, secret_keys=self._secret_keys)
        # Values that are saved elsewhere are not saved again.
        encoder._paths = {key: saved for key, saved in self.paths().items() if saved.startswith("/")}
        node = encoder.encode(value, path)
        self.size += encoder.size
        return encoder.digest(node), None if encoder.left else node

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            return self._leave(path, f"{value.dtype} {id(value)}")
        local = local_part(value.detach())
        self.size += local.numel() * local.element_size()
        if is_sharded(value):
            self.needs[path] = "DTensor"
            return {"kind": "shard", "value": local}
        return local if local.device.type == "cpu" else {"kind": "tensor", "device": local.device.type, "value": local}

    def _array(self, value: Any, path: str) -> Any:
        import numpy

        if value.dtype.kind not in "biufcmMSU":
            return self._leave(path, f"{value.dtype} {id(value)}")
        # torch warns of arrays that cannot be written, so these are copied.
        flat = numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)
        data = torch.from_numpy(flat if flat.flags.writeable else flat.copy())
        self.size += data.numel()
        kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
        return {"kind": kind, "dtype": value.dtype.str, "shape": list(value.shape), "value": data}

    def _list(self, value: Any, path: str) -> Any:
        node: dict[str, Any] = {"kind": type(value).__name__}
        if isinstance(value, (set, frozenset)):
            if not all(type(item) in _SCALARS for item in value):
                return self._leave(path, f"set of {len(value)}")
            value = sorted(value, key=lambda item: (type(item).__name__, str(item)))
        if isinstance(value, deque):
            node["maxlen"] = value.maxlen
        if hasattr(value, "_fields"):
            node["kind"], self.needs[path] = "namedtuple", type(value).__name__
        return {**node, "items": self._items(dict(enumerate(value)), path)}

    def _dict(self, value: Any, path: str) -> Any:
        parts = [part for key in value for part in (key if type(key) is tuple else (key,))]
        if not all(type(part) in _SCALARS for part in parts):
            return self._leave(path, f"dict of {len(value)}")
        kind = type(value).__name__
        keys = [{"kind": "tuple", "items": list(key)} if type(key) is tuple else key for key in value]
        node: dict[str, Any] = {"kind": kind, "keys": keys}
        if isinstance(value, defaultdict):
            self.needs[path], node["factory"] = kind, getattr(value.default_factory, "__name__", None)
        return {**node, "items": self._items(value, path)}

    def _items(self, values: Mapping[Any, Any], path: str, form: str = "{}[{!r}]") -> Any:
        """Return a list where all values are plain, else a mapping by number: a sharded checkpoint takes mappings apart, but no lists."""
        self.size += 8 * len(values)
        if all(type(value) in _NUMBERS for value in values.values()):
            return list(values.values())
        items = [
            self.encode(value, form.format(path, key), key if type(key) is str else "") for key, value in values.items()
        ]
        is_flat = not any(isinstance(item, (dict, Tensor)) for item in items)
        return items if is_flat else {str(number): item for number, item in enumerate(items)}

    def _stateful(self, value: Any, path: str) -> Any:
        kind = type(value).__name__
        try:
            state = value.state_dict()
        except Exception as error:
            return self._leave(path, f"{kind}.state_dict() raises {type(error).__name__}")
        digest, node = self._apart(state, path)
        if node is None:
            return self._leave(path, digest)
        self.needs[path] = kind
        found = {"kind": "stateful", "class": kind, "state": node}
        if isinstance(value, nn.Module):
            more = {name: getattr(holder, key) for name, (holder, key) in _beside_state(value, state).items()}
            # Objects among them are not followed: their modules make them.
            outer, self._depth = self._depth, _LOOKED_AT
            left = dict(self.left)
            found["more"] = self.encode(more, f"{path}.more")
            self._depth, self.left = outer, left
        return found

    def _object(self, value: Any, path: str) -> Any:
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict) or self._depth >= _LOOKED_AT or isinstance(value, io.IOBase):
            return self._leave(path, f"{type(value).__name__} {id(value)}")
        paths = self.paths()
        tables: tuple[dict[Any, str], ...] = (paths, self.needs)
        lengths, changeable = list(map(len, tables)), self._changeable()
        self._depth += 1
        items = self._items(held, path, form="{}.{}")
        self._depth -= 1
        node = {"kind": "object", "class": type(value).__name__, "keys": list(held), "items": items}
        if self._depth or changeable != self._changeable():
            # An object within another one is only compared. No saved value may refer to its parts.
            for table, length in zip(tables, lengths):
                for key in list(table)[length:]:
                    del table[key]
            return self._leave(path, self.digest(node))
        self.needs[path] = type(value).__name__
        return node

    def _changeable(self) -> int:
        return sum(seen is not None for seen in self.left.values())

    def digest(self, node: Any) -> bytes:
        """Return the digest of a node that `encode` returned; values that are tied to it count too."""
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
        elif node.get("kind") == "same" and node["path"] not in seen and node["path"] in self._nodes:
            seen.add(node["path"])
            self._feed(total, self._nodes[node["path"]], seen)
        else:
            for key, item in node.items():
                total.update(key.encode())
                self._feed(total, item, seen)


class Decoder:
    """Puts encoded values back, into the objects that are there where they fit.

    Args:
        encoder: Encoder of the current values.
        makes: Whether generators and default dictionaries are made: a state is restored into nothing, and then handed to its object.
    """

    def __init__(self, encoder: Encoder, *, makes: bool = False) -> None:
        # An object takes one value: where two values were apart when they were saved, the second one gets its own object.
        self._taken = {key for key, path in encoder.paths().items() if path.startswith("/")}
        self._live = encoder.objects
        self._components = encoder.components
        self._makes = makes
        self._restored: dict[str, object] = {}

    def decode(self, node: Any, current: Any, path: str) -> Any:
        """Return the value of a node, which is `current` where that could take it; `MISSING` where it is left to the program."""
        if isinstance(node, Tensor):
            node = {"kind": "tensor", "device": "cpu", "value": node}
        if not isinstance(node, dict):
            return node
        kind = node["kind"]
        if kind == "left":
            return current
        if kind == "same":
            live = self._live.get(node["path"], MISSING)
            is_there = live is not MISSING and key_of(live) == key_of(current)
            return current if is_there else self._restored.get(node["path"], live)
        key = key_of(current)
        if key is not None and key in self._taken:
            current = MISSING
        value = self._decoded(kind, node, current, path)
        self._taken.add(key_of(value))
        self._restored[path] = value
        return value

    def _decoded(self, kind: str, node: Any, current: Any, path: str) -> Any:
        if kind == "tensor":
            return _put(current, node["value"], node["device"])
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(node["value"].tolist())
        if kind == "complex":
            return complex(*node["value"])
        if kind in ("array", "scalar"):
            return _array_of(node, current)
        if kind == "shard":
            if not (isinstance(current, Tensor) and is_sharded(current)):
                raise CannotRestore("a tensor divided over the ranks")
            _put(local_part(current), node["value"], "cpu")
            return current
        if "class" in node:
            if kind == "generator" and self._makes:
                current = _generator_of(node)
            if type(current).__name__ != node["class"]:
                raise CannotRestore(f"an object of the class {node['class']}")
            self._fill(kind, node, current, path)
            return current
        return self._dict(kind, node, current, path) if "keys" in node else self._list(kind, node, current, path)

    def _list(self, kind: str, node: Any, current: Any, path: str) -> Any:
        if kind == "namedtuple" and not hasattr(type(current), "_fields"):
            raise CannotRestore("a named tuple")
        there = list(current) if isinstance(current, (list, tuple, deque)) else []
        found = [
            self.decode(item, there[n] if n < len(there) else MISSING, f"{path}[{n}]")
            for n, item in enumerate(_items(node))
        ]
        items = [item for item in found if item is not MISSING]
        if kind == "namedtuple":
            return type(current)(*items)
        if kind == "deque":
            if type(current) is not deque or current.maxlen != node["maxlen"]:
                return deque(items, node["maxlen"])
            current.clear()
            current.extend(items)
            return current
        if kind == "list" and type(current) is list:
            current[:] = items
            return current
        if kind == "set" and type(current) is set:
            current.clear()
            current.update(items)
            return current
        return next(each for each in _LISTS if each.__name__ == kind)(items)

    def _dict(self, kind: str, node: Any, current: Any, path: str) -> Any:
        keys = [tuple(key["items"]) if isinstance(key, dict) else key for key in node["keys"]]
        there = current if isinstance(current, dict) else {}
        found = {
            key: self.decode(item, there.get(key, MISSING), f"{path}[{key!r}]") for key, item in zip(keys, _items(node))
        }
        if type(current).__name__ != kind:
            if kind == "defaultdict" and not self._makes:
                raise CannotRestore("a defaultdict")
            current = next(each for each in _DICTS if each.__name__ == kind)()
            if kind == "defaultdict":
                current.default_factory = {each.__name__: each for each in _FACTORIES}.get(node["factory"])
        current.clear()
        current.update({key: item for key, item in found.items() if item is not MISSING})
        return current

    def _fill(self, kind: str, node: Any, current: Any, path: str) -> None:
        """Put a state into an object that the program has made."""
        if kind == "generator":
            set_generator_state(current, self.decode(node["state"], MISSING, f"{path}.state"))
        elif kind == "object":
            held = vars(current)
            for name, item in zip(node["keys"], _items(node)):
                value = self.decode(item, held.get(name, MISSING), f"{path}.{name}")
                if value is not MISSING:
                    held[name] = value
        else:
            decoder = Decoder(Encoder(self._components), makes=True)
            current.load_state_dict(decoder.decode(node["state"], MISSING, path))
            if "more" in node:
                beside = _beside_state(current, current.state_dict())
                more = dict(zip(node["more"]["keys"], _items(node["more"])))
                for name in more.keys() & beside.keys():
                    holder, key = beside[name]
                    there = getattr(holder, key)
                    value = self.decode(more[name], there, f"{path}.more[{name!r}]")
                    if value is not there and value is not MISSING:
                        setattr(holder, key, value)


def _items(node: Mapping[str, Any]) -> list[Any]:
    items = node["items"]
    return items if isinstance(items, list) else [items[str(number)] for number in range(len(items))]


def _name_of(value: object) -> str:
    """What tells one function, class, place or constant from another."""
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {id(value.__code__)}"
    return repr(value) if isinstance(value, (Enum, PurePath, torch.dtype, torch.device, range, slice)) else ""


def _is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value).__module__ == "numpy" and isinstance(value, (numpy.ndarray, numpy.generic))


def key_of(value: object) -> object:
    """What two names of one value have in common; `None` for values that cannot be changed in place."""
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


@torch.no_grad()
def _put(current: object, value: Tensor, device: str) -> Tensor:
    """Write a value into a tensor where it fits, else return another one."""
    fits = isinstance(current, Tensor) and (current.shape, current.dtype) == (value.shape, value.dtype)
    if isinstance(current, Tensor) and fits and (0 not in current.stride() or current.numel() < 2):
        current.copy_(value)
        return current
    return value.clone() if device == "cpu" else value.to(device, copy=True)


def _generator_of(node: Mapping[str, Any]) -> Any:
    """Return a new generator of the class of a saved one; `MISSING` where that is none of torch, NumPy and `random`."""
    kind, state = node["class"], node["state"]
    if isinstance(state, dict) and state["kind"] == "dict":
        import numpy

        bits = getattr(numpy.random, dict(zip(state["keys"], _items(state)))["bit_generator"])
        return numpy.random.RandomState() if kind == "RandomState" else numpy.random.Generator(bits())
    made: dict[str, Callable[[], Any]] = {"Generator": torch.Generator, "Random": random.Random}
    return made[kind]() if kind in made else MISSING


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
