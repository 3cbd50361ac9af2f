"""Spans of time as a setting gives them."""

from __future__ import annotations

import re

_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)\Z")


def seconds_of(key: str, limit: float | str) -> float:
    """Return a span of time in seconds.

    Args:
        key: The setting, for the message.
        limit: Seconds, as a number or a text, or `MM:SS` or `HH:MM:SS`.

    Raises:
        ValueError: If it is none of these, or not above 0.
    """
    clock = _CLOCK.match(limit) if isinstance(limit, str) else None
    try:
        seconds = (
            float(limit)
            if clock is None
            else sum(float(part or 0) * unit for part, unit in zip(clock.groups(), (3600, 60, 1)))
        )
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"Expected {key} to be seconds or 'HH:MM:SS'. Received: {key}={limit!r}.")
    return seconds
