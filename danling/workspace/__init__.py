"""The directory of a run, the right to write into it, and the metadata and metrics in it.

Trackers, progress and the log of a run are in `danling.reporting`; their names are found here as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from danling.reporting.logging import Printer, RunLog, close_run_log, open_run_log, speaking_for
    from danling.reporting.progress import Progress, format_duration, format_number, format_scores
    from danling.reporting.tracker_services import TensorBoardTracker, WandbTracker
    from danling.reporting.trackers import JsonlTracker, Tracker, TrackerSet, read_jsonl

    from .identity import CodeIdentity, make_timestamp, run_id
    from .workspace import Workspace
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "identity": ("CodeIdentity", "make_timestamp", "run_id"),
            "danling.reporting.logging": ("Printer", "RunLog", "close_run_log", "open_run_log", "speaking_for"),
            "danling.reporting.progress": ("Progress", "format_duration", "format_number", "format_scores"),
            "danling.reporting.tracker_services": ("TensorBoardTracker", "WandbTracker"),
            "danling.reporting.trackers": ("JsonlTracker", "Tracker", "TrackerSet", "read_jsonl"),
            "workspace": ("Workspace",),
        },
    )

__all__ = [
    "CodeIdentity",
    "JsonlTracker",
    "Printer",
    "Progress",
    "RunLog",
    "TensorBoardTracker",
    "Tracker",
    "TrackerSet",
    "WandbTracker",
    "Workspace",
    "close_run_log",
    "format_duration",
    "format_number",
    "format_scores",
    "make_timestamp",
    "open_run_log",
    "read_jsonl",
    "run_id",
    "speaking_for",
]
