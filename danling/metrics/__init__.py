"""Weighted means, evaluation totals, common metrics and scores."""

from __future__ import annotations

from .collection import MetricSet, TrainMetrics
from .functional import accuracy, mean_absolute_error, mean_squared_error, top_k_accuracy
from .meters import Meter, Meters, as_number, check_numbers, check_whole
from .scores import ScoreBoard, infer_mode

__all__ = [
    "Meter",
    "Meters",
    "MetricSet",
    "ScoreBoard",
    "TrainMetrics",
    "accuracy",
    "as_number",
    "check_numbers",
    "check_whole",
    "infer_mode",
    "mean_absolute_error",
    "mean_squared_error",
    "top_k_accuracy",
]
