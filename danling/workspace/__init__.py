"""The run directory: names, metadata, logs, figures and progress."""

from __future__ import annotations

from .identity import CodeIdentity, make_timestamp, run_id
from .logging import close_run_log, open_run_log
from .progress import Progress, format_scores
from .trackers import JsonlTracker, TensorBoardTracker, Tracker, WandbTracker
from .workspace import Workspace

__all__ = [
    "CodeIdentity",
    "JsonlTracker",
    "Progress",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "Workspace",
    "close_run_log",
    "format_scores",
    "make_timestamp",
    "open_run_log",
    "run_id",
]
