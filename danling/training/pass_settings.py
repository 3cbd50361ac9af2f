"""Saves the values that `on_pass_start` sets in modules: the hook is not called for the rest of a pass that is resumed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from danling.checkpoints.payload import DICTS, LISTS
from danling.utils.encoding import MISSING, SCALARS, is_of_numpy
from danling.utils.secrets import names_secret
from danling.utils.tensors import canonical_name

from .attribute_restore import CannotRestore, Decoder
from .attribute_snapshot import AttributeSnapshot, Entry, Key, is_left_out
from .object_parts import OF_MODULE
from .rank_values import value_of_rank, values_of_all
from .run_state import StatePart

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_SECTION = "pass_settings"


class PassSettings:
    """Remembers which values of model and criterion `on_pass_start` has set, such as the `p` of a dropout or the weights of classes.

    Values are numbers, text, tensors, arrays, members of enumerations, and containers of these. They are in a checkpoint as they are at
    the save, for each rank where ranks differ.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._set: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        """The names of the values that are saved, such as `model.dropout.p`."""
        return self._set

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is set inside."""
        before = {name: _mark(value) for name, value in self._values()}
        yield
        self._set |= {
            name for name, value in self._values() if before.get(name, MISSING) != _mark(value)
        }

    def part(self) -> StatePart:
        """Return the entry of a checkpoint."""
        return StatePart(_SECTION, self._state, self._load, default=dict, alone=self._state_alone)

    def _state(self) -> dict[str, Any]:
        """Return what was set. A small collective."""
        world = self._runner.world
        # Where one rank has set a value, that of another may be equal to what was there.
        entries = self._entries(set().union(*world.gather_objects(self._set)))
        return values_of_all(world, entries.keys(), entries).get(_SECTION, {})

    def _state_alone(self) -> dict[str, Any]:
        return {
            name: {"value": entry.node} for (_, name), entry in self._entries(self._set).items()
        }

    def _entries(self, names: Collection[str]) -> dict[Key, Entry]:
        """Return the encoded values of some names; one of which a part has no encoding is left to the program."""
        found: dict[Key, Entry] = {}
        if not names:
            return found
        snapshot = AttributeSnapshot(self._runner)
        # A buffer is named by its place among those of the model elsewhere, and is a value here.
        snapshot.paths.clear()
        chosen = {name: value for name, value in self._values() if name in names}
        for name, value in chosen.items():
            entry = snapshot.attribute(name, value)
            entry.digest = snapshot.digest_of(entry.node)
            if not entry.left:
                found[_SECTION, name] = entry
        return found

    def _load(self, stored: Mapping[str, Any], _: Collection[str]) -> None:
        modules = dict(modules_of(self._runner))
        decoder = Decoder(AttributeSnapshot(self._runner))
        for name, entry in stored.items():
            path, _, key = name.rpartition(".")
            module = modules.get(path)
            # Of another stage of a pipeline, or what is no value of the module, such as a method or a weight.
            if module is None or key in OF_MODULE or not _takes_value(module, key):
                continue
            node = value_of_rank(self._runner.world, f"state.{_SECTION}", name, entry)
            # Into no object that is there: the program may have given it to others too. A named tuple tells its class.
            there = getattr(module, key, MISSING)
            try:
                current = there if isinstance(there, tuple) else MISSING
                value = MISSING if node is MISSING else decoder.decode(node, current, name, key)
            except CannotRestore as error:
                logger.warning(
                    "%s is not as on_pass_start had set it, for the rest of the pass: it was %s.",
                    name,
                    error,
                )
                continue
            if value is MISSING or not _is_value(value):
                continue
            if key in module._buffers and isinstance(value, Tensor):
                value = value.to(self._runner.device)
            setattr(module, key, value)
            self._set.add(name)

    def _values(self) -> Iterator[tuple[str, object]]:
        """Yield the values of all modules, less text under the names of places and secrets."""
        secret_keys = self._runner.config.secret_keys or ()
        for path, module in modules_of(self._runner):
            # Buffers are not in `vars`.
            for key, value in (vars(module) | module._buffers).items():
                is_open = type(value) is not str or not is_left_out(
                    key, names_secret(key, secret_keys)
                )
                if key not in OF_MODULE and is_open and _is_value(value):
                    yield f"{path}.{key}", value


def modules_of(runner: TorchRunner) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of model and criterion, with names that begin with `model` and `criterion`."""
    for root, owner in (("model", runner.unwrapped_model), ("criterion", runner.criterion)):
        if isinstance(owner, nn.Module):
            for name, module in owner.named_modules():
                yield ".".join(filter(None, (root, canonical_name(name)))), module


def _is_value(value: Any) -> bool:
    """Whether a value is made of numbers, text, tensors, arrays and members of enumerations alone."""
    if type(value) in SCALARS or isinstance(value, Enum) or is_of_numpy(value):
        return True
    if isinstance(value, Tensor):
        # What is trained is in the state of the model.
        return not isinstance(value, nn.Parameter) and not value.requires_grad
    if type(value) in DICTS.values():
        return all(map(_is_value, value)) and all(map(_is_value, value.values()))
    is_named_tuple = isinstance(value, tuple) and hasattr(value, "_fields")
    return (is_named_tuple or type(value) in LISTS.values()) and all(map(_is_value, value))


def _mark(value: Any) -> Any:
    """Return what differs once a value was replaced or has changed in place."""
    if isinstance(value, Tensor):
        # The tensor itself is kept, so that no other one gets its id.
        return id(value), 0 if value.is_inference() else value._version, value
    if is_of_numpy(value):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(_mark(key), _mark(each)) for key, each in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), value.copy()
    if type(value) in LISTS.values() or isinstance(value, tuple):
        return type(value), [_mark(each) for each in value]
    return type(value), value


def _takes_value(module: nn.Module, key: str) -> bool:
    """Whether a name of a module is free, that of a value, or that of a buffer which is not there."""
    if key in module._buffers:
        # One that is there has been restored with the model or the criterion.
        return module._buffers[key] is None
    if key in vars(module):
        return _is_value(vars(module)[key])
    return key.isidentifier() and not hasattr(module, key)
