"""Updates and training: the window and its weights, precision, gradients, EMA, outcomes; passes, evaluation and run state."""

from __future__ import annotations

from .batch_weights import criterion_weight, model_weight, shifts_labels
from .batches import (
    TARGET_NAMES,
    call_model,
    count_tokens,
    criterion_loss,
    model_loss,
    peek_target,
    prediction_of,
    unpack_batch,
)
from .ema import EMA
from .outcome import UNCOMMITTED, NonFiniteError, UpdateOutcome
from .pass_agreement import PassAgreement
from .precision import Precision
from .reduction import DDPReduction, GradientReduction
from .sample_count import count_samples
from .session import TrainingSession
from .window import Window

__all__ = [
    "EMA",
    "TARGET_NAMES",
    "UNCOMMITTED",
    "DDPReduction",
    "GradientReduction",
    "NonFiniteError",
    "PassAgreement",
    "Precision",
    "TrainingSession",
    "UpdateOutcome",
    "Window",
    "call_model",
    "count_samples",
    "count_tokens",
    "criterion_loss",
    "criterion_weight",
    "model_loss",
    "model_weight",
    "peek_target",
    "prediction_of",
    "shifts_labels",
    "unpack_batch",
]
