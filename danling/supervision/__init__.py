"""What watches over a run from beside it: signals, heartbeat, garbage collection, profiler, telemetry."""

from __future__ import annotations

from .garbage import GcPacer
from .heartbeat import Heartbeat
from .profiler import Profiler
from .signals import EXIT_CODES, SIGNAL_REQUESTS, SignalWatcher
from .telemetry import Telemetry, memory_figures

__all__ = [
    "EXIT_CODES",
    "SIGNAL_REQUESTS",
    "GcPacer",
    "Heartbeat",
    "Profiler",
    "SignalWatcher",
    "Telemetry",
    "memory_figures",
]
