"""Saves the numbers and text that `on_pass_start` sets in modules: the hook is not called for the rest of a pass that is resumed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from danling.distributed import Domain
from danling.utils.secrets import names_secret
from danling.utils.tensors import canonical_name

from .attribute_snapshot import is_left_out
from .run_state import StatePart

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_PLAIN = (bool, int, float, str, type(None))
_OF_MODULE = frozenset(vars(nn.Module()))


class PassSettings:
    """Remembers which plain attributes of model and criterion `on_pass_start` has set, such as the `p` of a dropout.

    They are in a checkpoint with the values that they have at the save, those of the first rank that has each.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._set: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is set inside."""
        before = self._values()
        yield
        missing = object()
        self._set |= {name for name, value in self._values().items() if not _is_same(before.get(name, missing), value)}

    def part(self) -> StatePart:
        """Return the entry of a checkpoint."""
        world = self._runner.world
        return StatePart(
            "pass_settings", lambda: self._state(world), self._load, default=dict, alone=lambda: self._state(None)
        )

    def _state(self, domain: Domain | None) -> dict[str, object]:
        """Return what was set. A small collective of the domain, if there is one."""
        mine = {name: value for name, value in self._values().items() if name in self._set} if self._set else {}
        ranks = [mine] if domain is None else domain.gather_objects(mine)
        return {name: value for of_rank in reversed(ranks) for name, value in of_rank.items()}

    def _load(self, stored: Mapping[str, object], _: Collection[str]) -> None:
        modules = dict(self._modules())
        for name, value in stored.items():
            path, _, key = name.rpartition(".")
            module = modules.get(path)
            # Of another stage of a pipeline, or what is no plain attribute of the module, such as a method.
            if module is None or type(value) not in _PLAIN or key in _OF_MODULE or not _is_plain(module, key):
                continue
            setattr(module, key, value)
            self._set.add(name)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for root, owner in (("model", self._runner.unwrapped_model), ("criterion", self._runner.criterion)):
            if isinstance(owner, nn.Module):
                for name, module in owner.named_modules():
                    yield ".".join(filter(None, (root, canonical_name(name)))), module

    def _values(self) -> dict[str, object]:
        """Return the plain attributes of all modules, less text under the names of places and secrets."""
        secret_keys = self._runner.config.secret_keys or ()
        return {
            f"{path}.{key}": value
            for path, module in self._modules()
            for key, value in vars(module).items()
            if type(value) in _PLAIN and key not in _OF_MODULE
            if type(value) is not str or not is_left_out(key, names_secret(key, secret_keys))
        }


def _is_same(before: object, now: object) -> bool:
    return type(before) is type(now) and before == now


def _is_plain(module: nn.Module, key: str) -> bool:
    """Whether a name of a module is free, or that of a plain attribute."""
    if key in vars(module):
        return type(vars(module)[key]) in _PLAIN
    return key.isidentifier() and not hasattr(module, key)
