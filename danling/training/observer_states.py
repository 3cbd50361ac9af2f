"""Saves the states of observers by their names, and restores them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from danling.checkpoints.errors import restoring
from danling.utils.encoding import MISSING
from danling.utils.observers import Observers

from .attribute_restore import Decoder
from .attribute_snapshot import AttributeSnapshot, Entry, Key
from .rank_values import value_of_rank, values_of_all

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner

logger = logging.getLogger("danling")

_SECTION = "observers"


class ObserverStates:
    """The states of the observers that have one. They are encoded as the user's attributes are, and saved for each rank where they differ.

    An observer that is appended after a checkpoint was loaded gets its state then.
    """

    def __init__(self, runner: BaseRunner, observers: Observers) -> None:
        self._runner = runner
        self._observers = observers
        self._observers.on_added = self._restore_added
        self._waiting: dict[str, object] = {}
        """States of the loaded checkpoint, encoded, whose observers the program has not appended yet."""
        self._missing: set[str] = set()
        """Names of states that the loaded checkpoint has of other ranks only."""
        self._left_out: set[str] = set()
        """What `checkpoint.exclude_from_loading` leaves out of the loaded checkpoint: names, or the section."""
        self._is_loaded = False

    # Saving

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the section of a checkpoint; nothing without a state. Called on all ranks."""
        now = self._entries()
        return values_of_all(self._runner.world, now.keys(), now)

    def of_rank(self) -> dict[str, dict[str, Any]]:
        """Return what this rank alone would save, for a replica group that heals. No communication: may be called on one rank."""
        copies = {
            name: {"value": tree_map_only(Tensor, Tensor.clone, entry.node)}
            for (_, name), entry in self._entries().items()
        }
        return {_SECTION: copies} if copies else {}

    def remember(self) -> Callable[[], None]:
        """Return what puts the states back to what they are now. No communication."""
        copies: dict[str, dict[str, Any]] = {}
        # A list, since an observer that fails is removed.
        for name, observer in list(self._observers.with_state.items()):
            try:
                copies[name] = deepcopy(observer.state_dict())
            except Exception as error:
                self._observers.drop(observer, error)

        def put_back() -> None:
            # One that was appended since has nothing to go back to.
            known = [name for name in copies if name in self._observers.with_state]
            for name in known:
                observer = self._observers.with_state[name]
                try:
                    # A copy again: the update may be made more than twice.
                    observer.load_state_dict(deepcopy(copies[name]))
                except Exception as error:
                    self._observers.drop(observer, error)

        return put_back

    def _entries(self) -> dict[Key, Entry]:
        found: dict[Key, Entry] = {}
        # Shared by the small snapshots that follow: each would walk over all modules.
        known = AttributeSnapshot(self._runner)
        for name, observer in list(self._observers.with_state.items()):
            try:
                found[_SECTION, name] = _encoded(
                    AttributeSnapshot(self._runner, paths_of=known), name, observer.state_dict()
                )
            except Exception as error:
                self._observers.drop(observer, error)
        return found

    # Loading

    def load(self, payload: Mapping[str, Any], *, excluded: Collection[str] = ()) -> None:
        """Restore the states that a checkpoint has. Called on all ranks."""
        stored, world = payload.get(_SECTION) or {}, self._runner.world
        found = {
            name: value_of_rank(world, _SECTION, name, entry) for name, entry in stored.items()
        }
        self._waiting = {name: node for name, node in found.items() if node is not MISSING}
        self._missing = found.keys() - self._waiting.keys()
        self._is_loaded = True
        # Kept for observers that the program appends after the load.
        self._left_out = {entry.removeprefix(f"{_SECTION}.") for entry in excluded}
        self._restore(self._observers.with_state)

    def _restore_added(self, names: Collection[str]) -> None:
        if self._is_loaded:
            self._restore(names)

    def _restore(self, names: Collection[str]) -> None:
        for name in names:
            if self._left_out.intersection((name, _SECTION)):
                continue
            if name not in self._waiting:
                of_rank = f" of rank {self._runner.rank}" if name in self._missing else ""
                # Without a state on any rank, all say the same.
                if of_rank or self._runner.is_main_process:
                    logger.warning(
                        "The checkpoint has no state of the observer %r%s: it begins without one.",
                        name,
                        of_rank,
                    )
                continue
            with restoring(f"state of the observer {name!r}", f"{_SECTION}.{name}"):
                state = Decoder(AttributeSnapshot(self._runner)).decode(
                    self._waiting.pop(name), MISSING, name
                )
                self._observers.with_state[name].load_state_dict(state)

    def warn_of_others(self) -> None:
        """Name once the states of a checkpoint whose observers the program has not appended. Called when a training begins."""
        others, self._waiting = sorted(self._waiting), {}
        if others and self._runner.is_main_process:
            logger.warning(
                "The checkpoint has a state of the observers %s, which this program does not have: the next save leaves it out. Append "
                "them before the training begins.",
                ", ".join(map(repr, others)),
            )


def _encoded(snapshot: AttributeSnapshot, name: str, state: object) -> Entry:
    """Return the encoding of a state, from which another process can make it."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"Expected {name}.state_dict() to return a mapping. Received: {type(state).__name__}. Return a dictionary, an empty one for "
            "nothing."
        )
    entry = snapshot.attribute(name, dict(state))
    missing = [*entry.left, *entry.needs]
    if missing:
        path = missing[0].removeprefix(name)
        what = (
            entry.listed.get(missing[0])
            or entry.needs.get(missing[0])
            or "what no checkpoint holds, such as a path or a secret"
        )
        raise TypeError(
            f"Expected {name}.state_dict() to return tensors, NumPy arrays, numbers, text, and containers of them. Received: {what} as "
            f"{path}. Leave it out."
        )
    entry.digest = snapshot.digest_of(entry.node)
    return entry
