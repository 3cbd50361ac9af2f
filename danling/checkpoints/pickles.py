"""How deeply the values of a pickle are nested, read off its operations: nothing in it is made.

A key of a dictionary is hashed while a pickle is read, level by level in C, which ends the process where a key has 100,000 levels.
"""

from __future__ import annotations

import pickletools
from typing import Any, BinaryIO

_MAKE = frozenset(
    {
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "LIST",
        "DICT",
        "FROZENSET",
        "REDUCE",
        "NEWOBJ",
        "NEWOBJ_EX",
        "BINPERSID",
        "PERSID",
    }
)
"""Operations whose result has what they take from the stack one level below it."""
_ADD = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})
"""Operations that add to what is below them on the stack."""
_READ_MEMO = frozenset({"GET", "BINGET", "LONG_BINGET"})
_WRITE_MEMO = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})


def is_too_deep(source: BinaryIO, deepest: int) -> bool:
    """Return whether a value of a pickle has more levels than `deepest`, counted from above.

    Raises:
        ValueError: If it is no pickle.
    """
    # A list of one number for each value: what is added to a container counts wherever it is referred to.
    stack: list[list[int] | None] = []
    memo: dict[Any, list[int]] = {}
    for operation, argument, _ in pickletools.genops(source):
        name = operation.name
        if name in _WRITE_MEMO:
            key = len(memo) if name == "MEMOIZE" else argument
            memo[key] = stack[-1] or [0]
        elif name in _READ_MEMO:
            stack.append(memo.get(argument, [0]))
        elif name == "MARK":
            stack.append(None)
        else:
            # What it takes from the stack is one level below what it makes.
            below = max(
                (each[0] for each in _popped(stack, operation) if each is not None), default=0
            )
            if name in _ADD:
                # In place, so that the memo and other references to the container have it too.
                target = stack[-1] if stack and stack[-1] is not None else [0]
                target[0] = max(target[0], below + 1)
                below = target[0]
            elif operation.stack_after:
                depth = below + 1 if name in _MAKE else below
                stack += [[depth] for _ in operation.stack_after]
                below = depth
            if below > deepest:
                return True
    return False


def _popped(stack: list[list[int] | None], operation: Any) -> list[list[int] | None]:
    """Take from the stack what an operation takes; one that adds leaves what it adds to."""
    # A pickle that takes more than there is fails when it is read; here it is no error.
    taken: list[list[int] | None] = []
    if pickletools.markobject in operation.stack_before:
        while stack:
            value = stack.pop()
            if value is None:
                break
            taken.append(value)
        return taken
    for _ in range(len(operation.stack_before) - (operation.name in _ADD)):
        if stack:
            taken.append(stack.pop())
    return taken
