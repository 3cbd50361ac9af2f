"""What watches over a run from beside it: signals, heartbeat, garbage collection, profiler, failures."""

from __future__ import annotations

from danling.reporting.flops import counted, device_peak_flops, peak_flops
from danling.reporting.telemetry import Shared, Telemetry, memory_figures

from .activity import ActivitySampler, StackReader
from .failures import is_out_of_memory, record_failures, write_memory_snapshot
from .garbage import GcPacer
from .hangs import HangWatch
from .heartbeat import Heartbeat
from .profiler import Profiler
from .rank_watch import RankWatch
from .signals import EXIT_CODES, SIGNAL_REQUESTS, SignalWatcher

__all__ = [
    "EXIT_CODES",
    "SIGNAL_REQUESTS",
    "ActivitySampler",
    "GcPacer",
    "HangWatch",
    "Heartbeat",
    "Profiler",
    "RankWatch",
    "Shared",
    "SignalWatcher",
    "StackReader",
    "Telemetry",
    "counted",
    "device_peak_flops",
    "is_out_of_memory",
    "memory_figures",
    "peak_flops",
    "record_failures",
    "write_memory_snapshot",
]
