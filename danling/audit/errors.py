"""What a run that checks itself has found."""

from __future__ import annotations


class ReplicaDriftError(RuntimeError):
    """Ranks that hold copies of a tensor hold different values: a chip, a link or a program has written to one of them alone."""
