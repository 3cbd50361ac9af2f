"""What a snapshot of the attributes of a run is: each of them as values that a checkpoint may have.

Values are encoded as tensors, plain values, and mappings of these with an entry `kind`, which `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import re
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from danling.checkpoints.payload import DICTS, LISTS
from danling.data.randomness import Generators, generator_state, is_generator
from danling.utils.encoding import (
    MISSING,
    SCALARS,
    encode_array,
    encode_key,
    encode_set,
    is_of_numpy,
)
from danling.utils.secrets import names_secret
from danling.utils.tensors import (
    canonical_name,
    has_strided_values,
    is_plain_tensor,
    is_sharded,
    local_part,
)

from .object_parts import (
    attributes_of,
    has_state,
    is_all_attributes,
    is_data_or_tokenizer,
    outside_state,
)
from .user_attributes import (
    declared_names,
    named_roots,
    own_attributes,
    parameters_of,
    unsaved_buffers,
)

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

COMPARED_BYTES = 2**30
"""Most bytes of attributes to compare, in sum; a message names the others, unless the class lists them in `saved` or `not_saved`."""
_DECLARE = "Name the attribute in `saved` on the class if training changes it, such as saved = ('teacher',), else in `not_saved`"
_NUMBERS = (type(None), bool, int, float)
_CONSTANTS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    Enum,
    PurePath,
    torch.dtype,
    torch.device,
    logging.Logger,
    re.Pattern,
    range,
    slice,
    property,
    functools.partial,
)
"""What a program makes anew: left to it, also within objects."""
_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Semaphore,
    io.IOBase,
)
"""What belongs to a process, as open files do: left to the program, and not named."""
FACTORIES: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple, deque)
}
_PLACE = re.compile(r"(^|_)(dir|directory|folder|path|file|filename|root|url|uri)$")
_DEPTH = 3
"""How deep objects within objects are saved."""
_MOST_OBJECTS = 10_000
"""Objects that are looked at in one snapshot."""

_T = TypeVar("_T")
Key = tuple[str, str]
"""A section of a checkpoint, and a name in it."""


def _parts_of(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a component is made of: the entries of a mapping, the optimizers of several, the schedules of a sequence."""
    if isinstance(value, Mapping):
        yield from ((str(name), each) for name, each in value.items())
    # The names under which optimizers and schedules of torch and of common packages hold others.
    if isinstance(value, (Optimizer, LRScheduler)) or hasattr(value, "param_groups"):
        for name in (
            "optimizers",
            "schedulers",
            "_schedulers",
            "optimizer",
            "scheduler",
            "inner",
            "base_optimizer",
        ):
            within = getattr(value, name, None)
            several = within if isinstance(within, (list, tuple)) else [within]
            for number, each in enumerate(several):
                if isinstance(each, (Optimizer, LRScheduler)):
                    yield f"{name}[{number}]", each
                    yield from _parts_of(each)


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


class AttributeSnapshot:
    """Encoded values at one moment. An object that was met before is encoded once, and then named by its path.

    Attributes:
        entries: The values, by section and name.
        objects: Objects that were met, or are saved elsewhere, by path.
        unseen: Parts that are neither compared nor saved, by path: why, and what to do.
        members: Names of the attributes of objects, by path.
    """

    def __init__(
        self,
        runner: BaseRunner,
        begun: Mapping[str, list[str]] | None = None,
        *,
        paths_of: AttributeSnapshot | None = None,
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
    def at_all(
        cls, runner: BaseRunner, begun: Mapping[str, list[str]] | None = None
    ) -> AttributeSnapshot:
        """AttributeSnapshot at all that is saved where it has changed.

        Args:
            runner: Whose attributes.
            begun: The `members` that the program has set: one that is not there any more was deleted.
        """
        snapshot = cls(runner, begun)
        compared = 0
        declared = declared_names(runner, "saved")
        snapshot.entries.update(
            {
                ("requires_grad", name): Entry(parameter.requires_grad)
                for name, parameter in parameters_of(runner).items()
            }
        )
        for name, (part, key) in unsaved_buffers(runner).items():
            buffer = part._buffers[key]
            node = None if buffer is None else snapshot._tensor(buffer, name)
            snapshot.entries["buffers", name] = Entry(node)
        for name, value in own_attributes(runner).items():
            entry = snapshot.attribute(name, value, declared=name in declared)
            if compared + entry.size > COMPARED_BYTES and name not in declared:
                snapshot.unseen[name] = (
                    f"is not compared beyond {COMPARED_BYTES >> 30} GiB in sum. {_DECLARE}"
                )
            else:
                compared += entry.size
                snapshot.entries["attributes", name] = entry
        # At the end, when all values are encoded: the digest of one counts those that it is tied to.
        for entry in snapshot.entries.values():
            entry.digest = snapshot.digest_of(entry.node)
        return snapshot

    def attribute(self, name: str, value: object, *, declared: bool = False) -> Entry:
        """Return an attribute without its digest."""
        self._is_declared = declared
        self._entry = Entry()
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
            # Paths are found by the ids of objects, which are valid as long as the objects live.
            self.objects.update(self._paths_of.objects)
            return dict(known)
        runner, found = self._runner, self.objects
        found["/"] = runner
        for name in runner.library_names & vars(runner).keys():
            if name == "metrics" and self._with_metrics:
                continue
            found[f"/{name}"] = vars(runner)[name]
            found.update((f"/{name}/{part}", each) for part, each in _parts_of(vars(runner)[name]))
        # Saved under their own names, also where the user has made them attributes.
        found.update(
            (f"/observers/{name}", each) for name, each in runner.observers.with_state.items()
        )
        for at, module in named_roots(runner):
            found.update((f"/{at}{name}/module", each) for name, each in module.named_modules())
            tensors = [*module.named_parameters(), *module.named_buffers()]
            found.update((f"/{at}{canonical_name(name)}", each) for name, each in tensors)
        return {key: path for path, each in found.items() if (key := key_of(each)) is not None}

    @cached_property
    def _keyed(self) -> set[int]:
        runner = self._runner
        generators = Generators(
            {"datasets": runner.datasets, "dataloaders": runner.dataloaders}
        ).found
        return set(map(id, generators.values()))

    def _encode(self, value: object, path: str, name: str = "") -> object:
        if type(value) in _NUMBERS:
            return value
        key = key_of(value)
        if key is not None:
            if key in self.paths:
                return {"kind": "same", "path": self.paths[key]}
            # Before its parts are encoded, so that an object which contains itself ends there.
            self.paths[key], self.objects[path] = path, value
        # Everything below a name such as `credentials` is a secret too.
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
            # `frombuffer` refuses an empty buffer, and warns of one that cannot be written to.
            data = torch.zeros(0, dtype=torch.uint8)
            if value:
                data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
            return {"kind": kind, "value": data}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if is_of_numpy(value):
            return self._array(value, path)
        is_named_tuple = isinstance(value, tuple) and hasattr(own, "_fields")
        if is_named_tuple or own in LISTS.values():
            return self._list(value, path)
        if own in DICTS.values():
            return self._dict(value, path)
        if is_generator(value):
            # Generators of datasets and loaders are seeded by place, so their states are not needed.
            if id(value) in self._keyed:
                return self._leave(path)
            self._entry.needs[path] = kind
            return {
                "kind": "generator",
                "class": kind,
                "state": self._encode(generator_state(value), f"{path}.state"),
            }
        if isinstance(value, Enum) and (member := _member_node(value)) is not MISSING:
            return member
        if isinstance(value, _CONSTANTS):
            # Within an object, a constant that was replaced is a change of the object, which a warning names.
            if self._depth:
                self._entry.fixed[path] = value
            return self._leave(path, None if self._depth else value)
        if isinstance(value, _LOCKS):
            return self._leave(path)
        is_stateful = has_state(own)
        # What the class declares in `saved` is saved by its state, whatever it is.
        if not (self._is_declared and is_stateful):
            is_lazy = hasattr(own, "__next__") and not (is_stateful or isinstance(value, io.IOBase))
            if is_lazy or isinstance(value, DataLoader):
                self.unseen[path] = (
                    "is an iterator or a loader, whose position is not saved without `state_dict`: a resumed run reads it from its "
                    "beginning. Read its samples in the dataset of a split; if the position does not matter, name it in `not_saved`"
                )
                return self._leave(path, kind)
            if isinstance(value, nn.Module) and {p.requires_grad for p in value.parameters()} == {
                False
            }:
                self.unseen[path] = (
                    f"is a module without trainable parameters, which is not compared. {_DECLARE}"
                )
                return self._leave(path)
        if is_stateful:
            return self._stateful(value, path)
        if isinstance(value, (*LISTS.values(), *DICTS.values())):
            # Of a class of the user's, which may hold more.
            items: Any = value
            if not isinstance(value, dict):
                items = dict(enumerate(items))
            items = self._items(items, path)
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
        digest = self.digest_of(node)
        within = (f"{path}.", f"{path}[")
        entry = self._entry
        seen = {
            name: each
            for name, each in entry.left.items()
            if name.startswith(within) and each is not None
        }
        entry.left = _outside(entry.left, within)
        entry.fixed = _outside(entry.fixed, within)
        entry.listed = _outside(entry.listed, within)
        entry.needs = _outside(entry.needs, within)
        self.paths = {key: at for key, at in self.paths.items() if not at.startswith(within)}
        return self._leave(path, (digest, seen), what)

    def _tensor(self, value: Any, path: str) -> object:
        if not has_strided_values(value):
            version = 0 if value.is_inference() else value._version
            return self._leave(path, (id(value), version), "a tensor that is not strided")
        if type(value) not in (Tensor, nn.Parameter) and not is_sharded(value):
            if not is_plain_tensor(value):
                return self._leave(
                    path,
                    id(value),
                    f"a {type(value).__name__}, which has more than the values of a tensor",
                )
            self._entry.needs[path] = type(value).__name__
        local = local_part(value.detach())
        self._entry.size += local.numel() * local.element_size()
        if is_sharded(value):
            self._entry.needs[path] = "DTensor"
            return {"kind": "shard", "value": local}
        node = {"kind": "tensor", "device": local.device.type, "value": local}
        if path in self._entry.needs:
            # As a plain tensor: a safe reader does not know the class, which the program's own tensor has.
            return {**node, "value": local.as_subclass(Tensor), "class": self._entry.needs[path]}
        # The checkpoint is read into the memory of the host: a tensor of a device has to go back there.
        return local if local.is_cpu else node

    def _array(self, value: Any, path: str) -> object:
        node = encode_array(value)
        if node is None:
            return self._leave(path, (id(value), value.shape), f"an array of {value.dtype}")
        self._entry.size += node["value"].numel()
        return node

    def _list(self, value: Any, path: str) -> object:
        node: dict[str, Any] = {"kind": type(value).__name__}
        if isinstance(value, (set, frozenset)):
            encoded = encode_set(value, self._other_key)
            if MISSING in encoded["items"]:
                odd = next(item for item in value if self._key(item) is MISSING)
                return self._leave(
                    path,
                    (id(value), len(value)),
                    f"a {type(value).__name__} of {type(odd).__name__}",
                )
            return encoded
        if isinstance(value, deque):
            node["maxlen"] = value.maxlen
        if hasattr(value, "_fields"):
            node["kind"] = "namedtuple"
            self._entry.needs[path] = type(value).__name__
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
            if FACTORIES.get(node["factory"]) is not value.default_factory:
                self._entry.needs[path] = "defaultdict"
        return {**node, "items": self._items(value, path)}

    def _key(self, key: Any) -> Any:
        return encode_key(key, self._other_key)

    def _other_key(self, key: Any) -> Any:
        if isinstance(key, Enum):
            return _member_node(key)
        # Parameters and modules are named: the program has them already.
        path = self.paths.get(key_of(key), "") if isinstance(key, (Tensor, nn.Module)) else ""
        return {"kind": "same", "path": path} if path.startswith("/") else MISSING

    def _items(self, values: Mapping[Any, Any], path: str, form: str | None = None) -> object:
        """Return a list where all values are plain, else a mapping by number: a sharded checkpoint takes mappings apart, but no lists."""
        self._entry.size += 8 * len(values)
        items = [
            self._encode(
                value,
                path_of_item(path, key, number) if form is None else form.format(path, key),
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
            return self._leave(
                path, reason, f"a {kind} whose state_dict() raises {type(error).__name__}"
            )
        self.objects[f"{path}/state"] = (
            state  # kept, so that no id in it is given to another object
        )
        others, self._entry.left = self._entry.left, {}
        listed = dict(self._entry.listed)
        # Nothing else is tied to a state, since its object may take a copy of it; what is saved elsewhere is not saved again.
        paths, self.paths = (
            self.paths,
            {key: saved for key, saved in self.paths.items() if saved.startswith("/")},
        )
        node = {"kind": "stateful", "class": kind, "state": self._node(state, path)}
        self.paths = paths
        if self._entry.left:
            # A part of a state cannot be loaded.
            part = next(iter(self._entry.left))
            self._entry.left = others
            return self._leave_all(
                path, node, f"a {kind}, whose state_dict() has {part.removeprefix(path)}"
            )
        self._entry.needs[path] = kind
        if isinstance(value, nn.Module):
            more = {
                name: getattr(holder, key)
                for name, (holder, key) in outside_state(value, state).items()
            }
            # Objects among them are not followed: their modules make them.
            depth, self._depth = self._depth, _DEPTH
            node["more"] = self._encode(more, f"{path}.more")
            self._depth = depth
        self._entry.left, self._entry.listed = others, listed
        return node

    def _object(self, value: object, path: str) -> object:
        kind = type(value).__name__
        own: Any = type(value)
        if not is_all_attributes(own):
            return self._leave(path, id(value), "" if is_data_or_tokenizer(value) else f"a {kind}")
        if self._depth >= _DEPTH:
            return self._leave(path, id(value), f"a {kind}, deeper than {_DEPTH} objects")
        if self._objects >= _MOST_OBJECTS:
            return self._leave(path, id(value), f"a {kind}, after {_MOST_OBJECTS:,} objects")
        attributes = attributes_of(value)
        others, self._entry.left = self._entry.left, {}
        self._depth += 1
        self._objects += 1
        items = self._items(attributes, path, form="{}.{}")
        self._depth -= 1
        node = {"kind": "object", "class": kind, "keys": list(attributes), "items": items}
        self.members[path] = list(attributes)
        deleted = [name for name in self._begun.get(path, ()) if name not in attributes]
        if deleted:
            node["deleted"] = deleted
        changing = [name for name, seen in self._entry.left.items() if seen is not None]
        self._entry.left = {**others, **self._entry.left}
        # Half of an object is worse than none: one part that cannot be saved leaves out the whole object.
        if changing:
            what = self._entry.listed.get(changing[0], "a value without an encoding")
            part = changing[0].removeprefix(path)
            if ", in which " in what:  # the innermost part says most
                _, _, inner = what.partition(", in which ")
                part, what = f"{part}{inner.partition(' is ')[0]}", inner.partition(" is ")[2]
            what = f"a {kind}, in which {part} is {what}"
            return self._leave_all(path, node, "" if is_data_or_tokenizer(value) else what)
        self._entry.needs[path] = kind
        return node

    def digest_of(self, node: object) -> bytes:
        total = hashlib.sha1(usedforsecurity=False)
        self._feed(total, node, set())
        return total.digest()

    def _feed(self, total: Any, node: Any, seen: set[str]) -> None:
        if isinstance(node, Tensor):
            total.update(f"{node.dtype} {tuple(node.shape)}".encode())
            # Bits and not values, so that NaN equals NaN and -0.0 differs from 0.0; NumPy has no bfloat16.
            bits = (
                node.detach()
                .contiguous()
                .cpu()
                .reshape(-1)
                .resolve_conj()
                .resolve_neg()
                .view(torch.uint8)
            )
            total.update(memoryview(bits.numpy()))  # type: ignore[arg-type]
        elif not isinstance(node, dict):
            total.update(f"{type(node).__name__} {node!r}".encode())
        elif (
            node.get("kind") == "same"
            and node["path"] not in seen
            and node["path"] in self._encoded
        ):
            # An object that another attribute has too. `seen` ends objects that refer to each other.
            seen.add(node["path"])
            self._feed(total, self._encoded[node["path"]], seen)
        else:
            for key, item in node.items():
                total.update(key.encode())
                self._feed(total, item, seen)


def _outside(found: Mapping[str, _T], within: tuple[str, ...]) -> dict[str, _T]:
    return {path: each for path, each in found.items() if not path.startswith(within)}


def is_left_out(name: str, is_secret: bool) -> bool:
    """Whether a text under a name is neither saved nor restored: the name is that of a place, or something above it names a secret."""
    last = name.rpartition(".")[2].lower().replace("-", "_")
    return is_secret or bool(_PLACE.search(last))


def path_of_item(path: str, key: object, number: int) -> str:
    """Return the path of an item of a container: by its key where that is plain, else by its place."""
    is_plain = all(type(part) in SCALARS for part in (key if type(key) is tuple else (key,)))
    return f"{path}[{key!r}]" if is_plain else f"{path}[#{number}]"


def _member_node(value: Enum) -> Any:
    """Return the encoding of a member of an enumeration; `MISSING` where its class cannot be found again."""
    kind = type(value)
    node: dict[str, Any] = {"kind": "enum", "class": f"{kind.__module__}:{kind.__qualname__}"}
    if enumeration(node["class"]) is not kind:
        return MISSING
    if value.name in kind.__members__:
        return {**node, "name": value.name}
    # A combination of flags has no name.
    return {**node, "value": value.value} if isinstance(value, Flag) else MISSING


def enumeration(name: str) -> Any:
    """Return an enumeration of a module that the program has loaded; no file decides on imports."""
    module, _, path = name.partition(":")
    found = vars(sys.modules[module]).get(path) if module in sys.modules else None
    return found if isinstance(found, type) and issubclass(found, Enum) else None


def key_of(value: object) -> object:
    """Return what two names of one value have in common; `None` for values that cannot be changed in place."""
    if value is MISSING or isinstance(
        value, (*SCALARS, tuple, frozenset, bytes, complex, *_CONSTANTS)
    ):
        return None
    if (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_meta
        and not value.is_quantized
    ):
        local = local_part(value)
        # Views and parameters that share memory are one value. An empty tensor has no address to compare.
        if local.numel():
            return local.data_ptr(), local.dtype, local.shape, local.stride()
    return id(value)
