"""The form of a planted fault: a switch that brings back what the library once computed wrongly without a word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass


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
