"""The output of a run: metrics and their trackers, speed and FLOPs, progress, log, printing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .jsonl import JsonlTracker, read_jsonl
    from .logging import RunLog
    from .progress import Progress, format_duration, format_number, format_scores
    from .reporter import Reporter
    from .telemetry import Telemetry, device_peak_flops, memory_figures, peak_flops
    from .trackers import Tracker
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "jsonl": ("JsonlTracker", "read_jsonl"),
            "logging": ("RunLog",),
            "progress": ("Progress", "format_duration", "format_number", "format_scores"),
            "reporter": ("Reporter",),
            "telemetry": ("Telemetry", "device_peak_flops", "memory_figures", "peak_flops"),
            "trackers": ("Tracker",),
        },
    )

__all__ = [
    "JsonlTracker",
    "Progress",
    "Reporter",
    "RunLog",
    "Telemetry",
    "Tracker",
    "device_peak_flops",
    "format_duration",
    "format_number",
    "format_scores",
    "memory_figures",
    "peak_flops",
    "read_jsonl",
]
