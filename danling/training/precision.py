"""Mixed precision: the context of a forward, and the scaler of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

NO_CONTEXT: AbstractContextManager[object] = nullcontext()

_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    **dict.fromkeys((None, "fp32", "float32", "none", "no")),
}


class Precision:
    """Forward context and gradient scaler of one precision.

    Attributes:
        dtype: Autocast dtype, `None` for full precision.
        autocast: Returns the context of a forward.
        scaler: `torch.amp.GradScaler` for float16, else `None`.
        is_entered: Whether `forward_context` was asked for since this was last set to `False`.

    Raises:
        ValueError: If the name is unknown.
    """

    def __init__(self, name: str | None, device: torch.device) -> None:
        key = name.lower() if isinstance(name, str) else name
        if key not in _DTYPES:
            raise ValueError(
                f"Expected precision to be 'fp16', 'bf16' or none. Received: precision={name!r}."
            )
        self.dtype: torch.dtype | None = _DTYPES[key]
        self.autocast: Callable[[], AbstractContextManager[object]] = no_autocast
        if self.dtype is not None:
            self.autocast = partial(torch.autocast, device.type, dtype=self.dtype)
        self.is_entered = False
        self._device = device
        self.scaler = self.new_scaler()

    def new_scaler(self) -> torch.amp.GradScaler | None:
        """Return a scaler for the gradients of one optimizer; `None` unless the dtype is float16."""
        return torch.amp.GradScaler(self._device.type) if self.dtype is torch.float16 else None


def leave_update(scaler: torch.amp.GradScaler | None) -> None:
    """Forget that gradients have been unscaled: the update that did it was left before its end, and is made again."""
    # torch refuses to unscale twice before an `update`, which this update never reached.
    if scaler is not None:
        scaler._per_optimizer_states.clear()


def no_autocast() -> AbstractContextManager[object]:
    """Return the context of a forward in full precision."""
    return NO_CONTEXT
