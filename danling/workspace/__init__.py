"""The directory of a run and all that is written for people to read: metadata, logs, curves, progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .identity import CodeIdentity, make_timestamp, run_id
    from .logging import RunLog, close_run_log, open_run_log, speaking_for
    from .printing import Printer
    from .progress import Progress, format_duration, format_number, format_scores
    from .trackers import JsonlTracker, TensorBoardTracker, Tracker, TrackerSet, WandbTracker, read_jsonl
    from .workspace import Workspace
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "identity": ("CodeIdentity", "make_timestamp", "run_id"),
            "logging": ("RunLog", "close_run_log", "open_run_log", "speaking_for"),
            "printing": ("Printer",),
            "progress": ("Progress", "format_duration", "format_number", "format_scores"),
            "trackers": ("JsonlTracker", "TensorBoardTracker", "Tracker", "TrackerSet", "WandbTracker", "read_jsonl"),
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
