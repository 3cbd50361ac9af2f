"""`runner.carry`: what one micro-batch hands to the next, such as the hidden state of a recurrent network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_carry(carry: Any, change: Callable[[Tensor], Tensor], path: str = "self.carry") -> Any:
    """Return a carry with each tensor changed; lists, tuples and mappings are made anew, mappings as `dict`."""
    if isinstance(carry, Tensor):
        return change(carry)
    if carry is None or isinstance(carry, (bool, int, float, str)):
        return carry
    if isinstance(carry, Mapping):
        return {key: map_carry(value, change, f"{path}[{key!r}]") for key, value in carry.items()}
    if type(carry) in (list, tuple):
        return type(carry)(map_carry(value, change, f"{path}[{index}]") for index, value in enumerate(carry))
    raise TypeError(
        f"Expected self.carry to be of tensors, numbers and None, and of lists, tuples and mappings of them. Received: {path} of type "
        f"{type(carry).__name__}. Put its tensors into a tuple."
    )
