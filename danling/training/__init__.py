"""Updates and training: the window and its weights, precision, gradients, EMA, outcomes; passes, evaluation and run state."""

from __future__ import annotations

from .batches import (
    TARGET_NAMES,
    call_model,
    count_samples,
    count_tokens,
    criterion_loss,
    is_pair,
    model_loss,
    peek_target,
    prediction_of,
    unpack_batch,
)
from .compilation import Compilation
from .ema import EMA
from .evaluation import checked_figures
from .passes import PassAgreement
from .recompute import MemoryRetry
from .reduction import (
    DDPReduction,
    GradientReduction,
    LocalReduction,
    Precision,
    average_gradients,
    clip_by_norm,
    clip_by_value,
    clip_coefficient,
    gradients_of,
    nonfinite_parameters,
    scale_gradients,
    total_norm,
)
from .session import EvaluationStopped, TrainingSession
from .update import UNCOMMITTED, NonFiniteError, UpdateOutcome, Window
from .weighing import BatchLoss, criterion_setting, criterion_weight, model_weight, shifts_labels, unweighed

__all__ = [
    "EMA",
    "TARGET_NAMES",
    "UNCOMMITTED",
    "BatchLoss",
    "Compilation",
    "DDPReduction",
    "EvaluationStopped",
    "GradientReduction",
    "LocalReduction",
    "MemoryRetry",
    "NonFiniteError",
    "PassAgreement",
    "Precision",
    "TrainingSession",
    "UpdateOutcome",
    "Window",
    "average_gradients",
    "call_model",
    "checked_figures",
    "clip_by_norm",
    "clip_by_value",
    "clip_coefficient",
    "count_samples",
    "count_tokens",
    "criterion_loss",
    "criterion_setting",
    "criterion_weight",
    "gradients_of",
    "is_pair",
    "model_loss",
    "model_weight",
    "nonfinite_parameters",
    "peek_target",
    "prediction_of",
    "scale_gradients",
    "shifts_labels",
    "total_norm",
    "unpack_batch",
    "unweighed",
]
