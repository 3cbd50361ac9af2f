"""Warnings that are attributed to a line of the user's code."""

from __future__ import annotations

import sys
import warnings

_INSIDE = ("danling", "chanfig")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn, and attribute the warning to the nearest caller outside this library.

    Python shows a `DeprecationWarning` only if it is attributed to `__main__`, and prints the line it is attributed to. Both help only
    if that line is the user's, however deep in the library the cause is noticed.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
