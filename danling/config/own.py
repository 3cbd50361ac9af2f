"""What is known of the top-level keys that are a program's own."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


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

        Args:
            values: The top level of the configuration.
            declared: Keys of the library and of the configuration class.
        """
        known = {*declared, *self.declared, *self.read}
        return {str(name) for name, value in values.items() if name not in known and _asks(value)}


def _asks(value: object) -> bool:
    return value is not None and value is not False and not (isinstance(value, Mapping) and not value)
