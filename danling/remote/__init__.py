"""Runs in object stores: where their objects are, a typed client, and what copies a run there and brings it back."""

from __future__ import annotations
