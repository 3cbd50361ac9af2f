"""How one update is made: the window and its weights, precision, gradients, averaging, and what came of it."""

from __future__ import annotations

from .batches import (
    call_model,
    count_samples,
    count_tokens,
    criterion_setting,
    criterion_weight,
    peek_target,
    unpack_batch,
)
from .compilation import Compilation
from .ema import EMA
from .gradients import (
    average_gradients,
    clip_by_norm,
    clip_coefficient,
    gradients_of,
    nonfinite_parameters,
    scale_gradients,
    total_norm,
)
from .outcome import NonFiniteError, UpdateOutcome
from .precision import Precision
from .retry import MemoryRetry
from .window import Window

__all__ = [
    "EMA",
    "Compilation",
    "MemoryRetry",
    "NonFiniteError",
    "Precision",
    "UpdateOutcome",
    "Window",
    "average_gradients",
    "call_model",
    "clip_by_norm",
    "clip_coefficient",
    "count_samples",
    "count_tokens",
    "criterion_setting",
    "criterion_weight",
    "gradients_of",
    "nonfinite_parameters",
    "peek_target",
    "scale_gradients",
    "total_norm",
    "unpack_batch",
]
