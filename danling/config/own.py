"""What is known of the top-level keys that are a program's own: who declares them, and whether anything reads them."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from danling.utils.plain import flatten as flattened

from .fields import fields_of
from .node import ClosedSection


@dataclass
class OwnKeys:
    """Names of a program's own top-level keys; copies of a configuration share it, since any of them may be read.

    Attributes:
        declared: Declared by the configuration class, or by the program's own parser of the command line.
        read: Read by the program.
        set: Set by code since the constructor of the library has ended.
        file: How keys were received from the file that the constructor was given.
    """

    declared: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)
    set: set[str] = field(default_factory=set)
    file: dict[str, str] = field(default_factory=dict)

    def unread(self, values: Mapping[str, object], *, declared: Collection[str]) -> builtins.set[str]:
        """Return the keys that ask for something and that nothing has read.

        Values of none and false, and empty sections, ask for nothing.
        """
        known = {*declared, *self.declared, *self.read}
        return {str(name) for name, value in values.items() if name not in known and _asks(value)}


def _asks(value: object) -> bool:
    return value is not None and value is not False and not (isinstance(value, Mapping) and not value)


class WatchedSection(ClosedSection):
    """A section that notes which of the keys that it does not declare are read, so that one which nothing reads can be told.

    What is noted lies in `_own_keys`, an `OwnKeys`; without it nothing is.
    """

    def _store(self, name: object, value: object) -> None:
        own = self.__dict__.get("_own_keys")
        if own is None or name in own.read or name in fields_of(type(self)):
            super()._store(name, value)
        else:
            # No instance attribute until it is read for the first time: so that the reading is seen.
            dict.__setitem__(self, name, value)

    def get(self, name: object, default: object = None, fallback: bool | None = None) -> Any:
        """Return the value of a key, or `default`; nothing is created.

        Args:
            name: A key, or keys joined by dots.
            default: What an absent key gives.
            fallback: As in `chanfig.Config`.
        """
        self._note_reading(name if dict.__contains__(self, name) else str(name).partition(".")[0])
        return super().get(name, default, fallback)

    def __getattr__(self, name: str) -> Any:
        self._note_reading(name)
        return super().__getattr__(name)

    def _note_reading(self, name: object) -> None:
        own = self.__dict__.get("_own_keys")
        if own is not None and name not in own.read and not str(name).startswith("_"):
            own.read.add(name)
            if dict.__contains__(self, name):
                self._store(name, dict.__getitem__(self, name))

    def _note_iteration(self) -> None:
        """Take all keys for read when a program goes through them, as `**config` does; copies and files made by the library read none."""
        caller = sys._getframe(2).f_globals.get("__name__", "")
        if caller.partition(".")[0] not in ("danling", "chanfig"):
            for name in list(dict.keys(self)):
                self._note_reading(name)

    def __iter__(self) -> Iterator[Any]:
        self._note_iteration()
        return super().__iter__()

    def keys(self) -> Any:
        """Return the keys; all of them count as read."""
        self._note_iteration()
        return super().keys()

    def values(self) -> Any:
        """Return the values; all of them count as read."""
        self._note_iteration()
        return super().values()

    def items(self) -> Any:
        """Return pairs of keys and values; all of them count as read."""
        self._note_iteration()
        return super().items()

    def plain(self) -> Any:
        """Return the contents as dictionaries, lists, strings, numbers, booleans and `None`; all of them count as read.

        Raises:
            TypeError: If a value has no plain form, naming its key.
        """
        self._note_iteration()
        return super().plain()

    def to_dict(self, flatten: bool = False) -> Any:
        """Return the same as `dict`."""
        self._note_iteration()
        return self.dict(flatten)

    def dict(self, flatten: bool = False) -> Any:
        """Return the contents as plain values; `flatten` joins the keys of nested sections by dots. All of them count as read."""
        self._note_iteration()
        return flattened(self.plain()) if flatten else self.plain()

    def claim(self, names: Iterable[str]) -> None:
        """Take top-level keys for read, such as those of a run that goes on.

        Args:
            names: The keys.
        """
        self.__dict__["_own_keys"].declared.update(names)

    def unread(self) -> set[str]:
        """Return the program's own top-level keys that its class does not declare and that nothing has read.

        Values of none and false, and empty sections, ask for nothing and are left out.
        """
        own: OwnKeys = self.__dict__["_own_keys"]
        return own.unread(dict(self.items()), declared=fields_of(type(self)))
