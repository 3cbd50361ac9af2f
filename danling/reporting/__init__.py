"""The output of a run: metrics and their trackers, speed and FLOPs, progress, log, printing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .logging import Printer, RunLog, close_run_log, open_run_log, speaking_for
    from .progress import Progress, format_duration, format_number, format_scores
    from .reporter import Reporter
    from .summary import describe_end, describe_parameters, describe_training
    from .telemetry import ModelFlops, Shared, Telemetry, device_peak_flops, memory_figures, peak_flops
    from .tracker_services import BUILT_IN_TRACKERS, MlflowTracker, TensorBoardTracker, TrackioTracker, WandbTracker
    from .trackers import JsonlTracker, Tracker, TrackerSet, read_jsonl
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "logging": ("Printer", "RunLog", "close_run_log", "open_run_log", "speaking_for"),
            "progress": ("Progress", "format_duration", "format_number", "format_scores"),
            "reporter": ("Reporter",),
            "summary": ("describe_end", "describe_parameters", "describe_training"),
            "telemetry": ("ModelFlops", "Shared", "Telemetry", "device_peak_flops", "memory_figures", "peak_flops"),
            "tracker_services": (
                "BUILT_IN_TRACKERS",
                "MlflowTracker",
                "TensorBoardTracker",
                "TrackioTracker",
                "WandbTracker",
            ),
            "trackers": ("JsonlTracker", "Tracker", "TrackerSet", "read_jsonl"),
        },
    )

__all__ = [
    "BUILT_IN_TRACKERS",
    "JsonlTracker",
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
    "TrackerSet",
    "TrackioTracker",
    "WandbTracker",
    "close_run_log",
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
