"""Mixed precision: autocast, and the scaler that float16 needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
_FULL = (None, "fp32", "float32", "none", "no")


class Precision:
    """Forward context and gradient scaler of one precision.

    Attributes:
        dtype: Autocast dtype, `None` for full precision.
        autocast: Returns the context of a forward.
        scaler: `torch.amp.GradScaler` for float16, else `None`.

    Args:
        name: `"fp16"`, `"bf16"`, or `None`.
        device: Device of the forward.

    Raises:
        ValueError: If the name is unknown.
    """

    def __init__(self, name: str | None, device: torch.device) -> None:
        key = name.lower() if isinstance(name, str) else name
        if key not in _FULL and key not in _DTYPES:
            raise ValueError(f"Expected precision to be 'fp16', 'bf16' or none. Received: precision={name!r}.")
        self.device = device
        self.dtype = _DTYPES.get(key) if key is not None else None
        self.autocast: Callable[[], AbstractContextManager[object]] = nullcontext
        if self.dtype is not None:
            self.autocast = partial(torch.autocast, device.type, dtype=self.dtype)
        self.scaler = torch.amp.GradScaler(device.type) if self.dtype is torch.float16 else None
