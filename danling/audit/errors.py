"""What a run that checks itself has found."""

from __future__ import annotations

from danling.distributed import ReplicaDriftError
from danling.training.session import IntactStateError

__all__ = ["ReplayMismatchError", "ReplicaDriftError"]


class ReplayMismatchError(IntactStateError):
    """An update that was made again did not come out bitwise the same: a chip, a link, or a program that is not repeatable.

    The update is taken back before it is raised, to the bit.
    """
