"""What is known of the top-level keys that are a program's own."""

from __future__ import annotations

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
