"""What watches over a run: signals, heartbeat, garbage collection."""

from __future__ import annotations

from .garbage import GcPacer
from .heartbeat import Heartbeat
from .signals import EXIT_CODES, SignalWatcher

__all__ = ["EXIT_CODES", "GcPacer", "Heartbeat", "SignalWatcher"]
