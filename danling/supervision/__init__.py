"""What watches over a run: signals, heartbeat, garbage collection, profiler, slow and hung ranks, failures."""

from __future__ import annotations

from .failures import is_out_of_memory, record_failures, write_memory_snapshot
from .garbage import GcPacer
from .heartbeat import Heartbeat
from .profiler import Profiler
from .rank_watch import RankWatch
from .signals import EXIT_CODES, SIGNAL_REQUESTS, SignalWatcher

__all__ = [
    "EXIT_CODES",
    "SIGNAL_REQUESTS",
    "GcPacer",
    "Heartbeat",
    "Profiler",
    "RankWatch",
    "SignalWatcher",
    "is_out_of_memory",
    "record_failures",
    "write_memory_snapshot",
]
