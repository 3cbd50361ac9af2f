"""The engine of DeepSpeed: its configuration out of the runner's, the engine itself, and the keys that it knows."""

from __future__ import annotations
