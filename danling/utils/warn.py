"""Warnings that point at the line of the user."""

from __future__ import annotations

import sys
import warnings

_INSIDE = ("danling", "chanfig")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn as of the nearest line outside this library.

    Python shows a `DeprecationWarning` only where it is raised in `__main__`, and says the line it is attributed to: both are of
    use only if that is the user's, however deep in the library the cause is noticed.

    Args:
        message: What is said.
        category: Kind of the warning.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
