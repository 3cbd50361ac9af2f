"""What watches over a run: signals, heartbeat, garbage collection, profiler, slow and hung ranks, failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .failures import is_out_of_memory, record_failures, write_memory_snapshot
    from .garbage import GcPacer
    from .hangs import HangWatch
    from .heartbeat import Heartbeat
    from .profiler import Profiler
    from .rank_watch import RankWatch
    from .signals import EXIT_CODES, SIGNAL_REQUESTS, SignalWatcher
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "failures": ("is_out_of_memory", "record_failures", "write_memory_snapshot"),
            "garbage": ("GcPacer",),
            "hangs": ("HangWatch",),
            "heartbeat": ("Heartbeat",),
            "profiler": ("Profiler",),
            "rank_watch": ("RankWatch",),
            "signals": ("EXIT_CODES", "SIGNAL_REQUESTS", "SignalWatcher"),
        },
    )

__all__ = [
    "EXIT_CODES",
    "SIGNAL_REQUESTS",
    "GcPacer",
    "HangWatch",
    "Heartbeat",
    "Profiler",
    "RankWatch",
    "SignalWatcher",
    "is_out_of_memory",
    "record_failures",
    "write_memory_snapshot",
]
