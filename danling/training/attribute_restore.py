"""Puts encoded attributes back, into the objects of a snapshot where they fit."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from enum import Enum, Flag
from itertools import chain, repeat
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from danling.checkpoints.payload import DICTS, LISTS
from danling.data.randomness import set_generator_state
from danling.utils.encoding import ARRAYS, MISSING, decode_array, decode_key
from danling.utils.secrets import names_secret
from danling.utils.tensors import has_strided_values, is_sharded, local_part

from .attribute_snapshot import (
    FACTORIES,
    AttributeSnapshot,
    enumeration,
    is_left_out,
    key_of,
    path_of_item,
)
from .object_parts import attributes_of, outside_state, slots_of

DELETED: Mapping[str, str] = {"kind": "deleted"}
"""What is saved of an attribute that the program set and training deleted."""
_BYTES: Mapping[str, type[Any]] = {"bytes": bytes, "bytearray": bytearray}


class CannotRestore(Exception):
    """What was saved needs an object that the program has not made."""


class Decoder:
    """Puts encoded values back, into the objects of a snapshot where they fit."""

    def __init__(self, snapshot: AttributeSnapshot, *, exact: bool = False) -> None:
        self._exact = exact
        """Whether attributes of objects that the values lack are removed."""
        # An object takes one value: where two values were apart when they were saved, the second one gets its own object.
        self._taken = {key for key, path in snapshot.paths.items() if path.startswith("/")}
        self._live = snapshot.objects
        self._restored: dict[str, object] = {}
        self._secret_keys = snapshot.secret_keys
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
            # Where the program has tied the values too, they stay tied; else this is what was restored under that path.
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
        if kind in _BYTES:
            return _BYTES[kind](node["value"].tolist())
        if kind in ARRAYS:
            return _array_of(node, current)
        if kind == "enum":
            return member_of(node)
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
        attributes = attributes_of(current)
        parameters = getattr(type(current), "__dataclass_params__", None)
        if parameters is not None and parameters.frozen:
            # Another object of its kind: others that refer to this one count on it to stay as it is.
            current = object.__new__(type(current))
            _set_attributes(current, attributes)
        found = {
            name: self.decode(item, attributes.get(name, MISSING), f"{path}.{name}", name)
            for name, item in zip(node["keys"], _items(node))
        }
        _set_attributes(
            current, {name: value for name, value in found.items() if value is not MISSING}
        )
        # After a resume an attribute that only the program has stays: a newer class may have more of them.
        gone = {
            name
            for name in node.get("deleted", ())
            if name in attributes and not self.is_of_program(name, attributes[name])
        }
        if self._exact:  # within a process, what is put back has no newer class
            gone |= attributes.keys() - set(node["keys"])
        for name in gone:
            # As `_set_attributes`: the class may count on its own `__delattr__` not being called.
            object.__delattr__(current, name)
        return current

    def _key(self, node: Any) -> Any:
        return decode_key(node, self._other_key)

    def _other_key(self, node: Mapping[str, Any]) -> Any:
        if node["kind"] == "enum":
            return member_of(node)
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
            pairs = zip(_items(node), chain(there, repeat(MISSING)))
            found = [
                self.decode(item, now, f"{path}[{number}]")
                for number, (item, now) in enumerate(pairs)
            ]
        items = [item for item in found if item is not MISSING]
        if hasattr(kind, "_fields"):
            return kind(*items)
        # The length of a deque is fixed when it is made.
        has_length = type(current) is deque and current.maxlen == node.get("maxlen")
        if kind is deque and not has_length:
            return deque(items, node["maxlen"])
        # In place where the type allows it: others may refer to the list.
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
            found[key] = self.decode(
                item, there.get(key, MISSING), path_of_item(path, key, number), name
            )
        if type(current).__name__ != node["kind"]:
            current = DICTS[node["kind"]]()
            if node["kind"] == "defaultdict":
                if node.get("factory") not in FACTORIES:
                    raise CannotRestore("a defaultdict")
                current.default_factory = FACTORIES[node["factory"]]
        current.clear()
        current.update({key: item for key, item in found.items() if item is not MISSING})
        return current

    def _load(self, node: Any, current: Any, path: str) -> None:
        # A copy: an object may hand out what it has, and empty that before it takes the state. A tensor of a graph cannot be copied so.
        now = current.state_dict()
        inner = (leaf for leaf in tree_leaves(now) if isinstance(leaf, Tensor) and not leaf.is_leaf)
        state = self._decoded(
            node["state"],
            copy.deepcopy(now, {id(leaf): leaf.detach().clone() for leaf in inner}),
            path,
        )
        current.load_state_dict(state)
        if "more" not in node:
            return
        beside = outside_state(current, current.state_dict())
        more = dict(zip(node["more"]["keys"], _items(node["more"])))
        for name in more.keys() & beside.keys():
            holder, key = beside[name]
            there = getattr(holder, key)
            value = self.decode(more[name], there, f"{path}.more[{name!r}]", name)
            if value is not there and value is not MISSING:
                setattr(holder, key, value)


def _set_attributes(value: object, attributes: Mapping[str, object]) -> None:
    """Set attributes of an object, also those in slots, without its own `__setattr__`."""
    slots = set(slots_of(type(value)))
    for name, each in attributes.items():
        if name in slots:
            object.__setattr__(value, name, each)
        else:
            vars(value)[name] = each


def member_of(node: Mapping[str, Any]) -> Enum:
    kind = enumeration(node["class"])
    if kind is not None and node.get("name") in kind.__members__:
        member: Enum = kind[node["name"]]
        return member
    if kind is not None and "value" in node and issubclass(kind, Flag):
        flags: Enum = kind(node["value"])
        return flags
    raise CannotRestore(f"a member {node.get('name', '')} of the enumeration {node['class']}")


def is_deleted(node: object) -> bool:
    return isinstance(node, dict) and node.get("kind") == DELETED["kind"]


def _items(node: Mapping[str, Any]) -> list[Any]:
    items = node["items"]
    return (
        items if isinstance(items, list) else [items[str(number)] for number in range(len(items))]
    )


@torch.no_grad()
def decode_tensor(node: Any, current: object) -> Tensor:
    """Write a value into a tensor where it fits, else return another one."""
    if isinstance(node, Tensor):
        node = {"kind": "tensor", "device": node.device.type, "value": node}
    value: Tensor = node["value"]
    if node["kind"] == "shard":
        if not (isinstance(current, Tensor) and is_sharded(current)):
            raise CannotRestore("a tensor divided over the ranks")
        local_part(current).copy_(value)
        return current
    if node.get("class", type(current).__name__) != type(current).__name__:
        raise CannotRestore(f"a tensor of the class {node['class']}")
    # The program may have set a tensor of a kind that no checkpoint contains, such as a sparse one.
    if isinstance(current, Tensor) and has_strided_values(current):
        fits = (current.shape, current.dtype) == (value.shape, value.dtype)
        # Elements of an expanded tensor share memory, into which no other values can be copied.
        has_own_memory = 0 not in current.stride() or current.numel() < 2
        if fits and has_own_memory:
            current.copy_(value)
            return current
    accelerator = torch.accelerator.current_accelerator()
    # A run that continues on a machine without that device keeps the tensor on the host.
    is_here = accelerator is not None and node.get("device") == accelerator.type
    device = node["device"] if is_here else "cpu"
    moved = value.to(device, copy=True)
    kind: Any = type(current)
    back: Tensor = moved.as_subclass(kind) if "class" in node else moved
    return back


def _array_of(node: Mapping[str, Any], current: object) -> Any:
    import numpy

    array = decode_array(node)
    fits = isinstance(current, numpy.ndarray) and (current.shape, current.dtype) == (
        array.shape,
        array.dtype,
    )
    if isinstance(current, numpy.ndarray) and fits and current.flags.writeable:
        current[...] = array
        return current
    return array
