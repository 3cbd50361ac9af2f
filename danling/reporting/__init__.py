"""What is seen of a run: metrics and their trackers, speed and FLOPs, progress, log, printing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .builtin import BUILT_IN_TRACKERS, TrackerPlace
    from .description import describe_batches, describe_parameters, describe_training
    from .flops import ModelFlops, counted, device_peak_flops, peak_flops
    from .logging import RunLog, close_run_log, open_run_log, speaking_for
    from .mlflow_tracker import MlflowTracker
    from .printing import Printer
    from .progress import Progress, format_duration, format_number, format_scores
    from .reporter import Reporter
    from .summary import Launch, describe_end
    from .telemetry import Shared, Telemetry, memory_figures
    from .trackers import JsonlTracker, TensorBoardTracker, Tracker, TrackerSet, WandbTracker, read_jsonl
    from .trackio_tracker import TrackioTracker
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "builtin": ("BUILT_IN_TRACKERS", "TrackerPlace"),
            "description": ("describe_batches", "describe_parameters", "describe_training"),
            "flops": ("ModelFlops", "counted", "device_peak_flops", "peak_flops"),
            "logging": ("RunLog", "close_run_log", "open_run_log", "speaking_for"),
            "mlflow_tracker": ("MlflowTracker",),
            "printing": ("Printer",),
            "progress": ("Progress", "format_duration", "format_number", "format_scores"),
            "reporter": ("Reporter",),
            "summary": ("Launch", "describe_end"),
            "telemetry": ("Shared", "Telemetry", "memory_figures"),
            "trackers": ("JsonlTracker", "TensorBoardTracker", "Tracker", "TrackerSet", "WandbTracker", "read_jsonl"),
            "trackio_tracker": ("TrackioTracker",),
        },
    )

__all__ = [
    "BUILT_IN_TRACKERS",
    "JsonlTracker",
    "Launch",
    "MlflowTracker",
    "ModelFlops",
    "Printer",
    "Progress",
    "Reporter",
    "RunLog",
    "Shared",
    "Telemetry",
    "TensorBoardTracker",
    "Tracker",
    "TrackerPlace",
    "TrackerSet",
    "TrackioTracker",
    "WandbTracker",
    "close_run_log",
    "counted",
    "describe_batches",
    "describe_end",
    "describe_parameters",
    "describe_training",
    "device_peak_flops",
    "format_duration",
    "format_number",
    "format_scores",
    "memory_figures",
    "open_run_log",
    "peak_flops",
    "read_jsonl",
    "speaking_for",
]
