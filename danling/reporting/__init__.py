"""What is seen of a run: figures and their trackers, speed and FLOPs, progress, log, printing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .flops import counted, device_peak_flops, peak_flops
    from .logging import RunLog, close_run_log, open_run_log, speaking_for
    from .printing import Printer
    from .progress import Progress, format_duration, format_number, format_scores
    from .telemetry import Shared, Telemetry, memory_figures
    from .trackers import JsonlTracker, TensorBoardTracker, Tracker, TrackerSet, WandbTracker, read_jsonl
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "flops": ("counted", "device_peak_flops", "peak_flops"),
            "logging": ("RunLog", "close_run_log", "open_run_log", "speaking_for"),
            "printing": ("Printer",),
            "progress": ("Progress", "format_duration", "format_number", "format_scores"),
            "telemetry": ("Shared", "Telemetry", "memory_figures"),
            "trackers": ("JsonlTracker", "TensorBoardTracker", "Tracker", "TrackerSet", "WandbTracker", "read_jsonl"),
        },
    )

__all__ = [
    "JsonlTracker",
    "Printer",
    "Progress",
    "RunLog",
    "Shared",
    "Telemetry",
    "TensorBoardTracker",
    "Tracker",
    "TrackerSet",
    "WandbTracker",
    "close_run_log",
    "counted",
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
