"""How often a test kills: a few times, or its share of `make chaos N=1000`."""

from __future__ import annotations

import os
from pathlib import Path

ASKED = int(os.environ.get("CHAOS_KILLS", "0"))
"""Kills at random instants that are asked for over all tests together; 0 where none are."""
SEED = int(os.environ.get("CHAOS_SEED", "0"))
"""Begins the random instants elsewhere."""


def share(part: float, *, otherwise: int) -> int:
    """Return how often a test kills."""
    return max(round(ASKED * part), otherwise) if ASKED else otherwise


def report(what: str, kills: int, ends: int) -> None:
    """Write down what was killed how often, and how many runs ended bitwise as the one left alone, where the report is asked for."""
    place = os.environ.get("CHAOS_REPORT")
    if place:
        with Path(place).open("a") as file:
            file.write(f"{kills:6} kills {ends:5} ends  {what}\n")
