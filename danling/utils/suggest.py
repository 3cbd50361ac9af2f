"""Name the key a user probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Return the option closest to `name`, or `None` when nothing is close."""
    by_lower = {option.lower(): option for option in options}
    matches = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest option, or an empty string."""
    match = nearest(name, options)
    return f" Did you mean {match!r}?" if match else ""
