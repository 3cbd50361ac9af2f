"""The form of a planted fault: a switch that brings back what the library once computed wrongly without a word."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

VARIABLE = "EXPLORE_PLANTED"
"""The variable of the environment that names the fault to bring back; processes of a run inherit it."""


@dataclass(frozen=True)
class Planted:
    """A fault of the past.

    Attributes:
        name: Its name.
        point: Its number in the lists of past faults.
        breaks: What it breaks, in one sentence.
        switch: Brings it back within a context.
    """

    name: str
    point: str
    breaks: str
    switch: Callable[[], AbstractContextManager[None]]


def active() -> AbstractContextManager[None]:
    """Return a context with the fault that the environment names, if it names one."""
    name = os.environ.get(VARIABLE)
    if not name:
        return nullcontext()
    from explore import planted, planted_blind

    faults = {fault.name: fault for fault in (*planted.PLANTED, *planted_blind.PLANTED)}
    return faults[name].switch()
