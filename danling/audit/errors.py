"""What a run that checks itself has found."""

from __future__ import annotations

from danling.distributed import ReplicaDriftError

__all__ = ["ReplayMismatchError", "ReplicaDriftError"]


class ReplayMismatchError(RuntimeError):
    """An update that was made again did not come out bitwise the same: a chip, a link, or a program that is not repeatable."""

    def __init__(self, message: str, *, is_taken_back: bool = True) -> None:
        super().__init__(message)
        self.is_taken_back = is_taken_back

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what is needed to make it again."""
        return _mismatch, (str(self), self.is_taken_back)


def _mismatch(message: str, is_taken_back: bool) -> ReplayMismatchError:
    return ReplayMismatchError(message, is_taken_back=is_taken_back)
