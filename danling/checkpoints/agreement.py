"""Errors that all ranks raise together, although only one of them has met with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from danling.utils.protocols import ReductionDomain

from . import storage
from .errors import CheckpointDiskError, CheckpointError, disk_error

T = TypeVar("T")

Told = tuple[type[Exception], str]
"""The class and the text of an error: it need not be possible to pickle the error itself."""


class RankAgreement:
    """Lets what fails on one rank fail on all of them, in the same words. Every method but `raise_alone` is called on all ranks."""

    def __init__(self, domain: ReductionDomain, directory: Path, *, still_good: Callable[[], str]) -> None:
        self._domain = domain
        self._directory = directory
        self._still_good = still_good

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; return its value, or raise its error, on all ranks."""
        value: Any = None
        error: Exception | None = None
        if self._domain.rank == 0:
            try:
                value = action()
            except Exception as raised:
                error = raised
        value, told = self._domain.broadcast_object((value, self._told(error)))
        _raise(error, told)
        result: T = value
        return result

    def on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; return its value here, or raise the error of any rank on all of them."""
        value: Any = None
        error: Exception | None = None
        try:
            value = action()
        except Exception as raised:
            error = raised
        self.agree(error)
        result: T = value
        return result

    def agree(self, error: BaseException | None) -> None:
        """Raise the error of any rank on all of them."""
        told = self._domain.gather_objects(self._told(error))
        _raise(error, next((entry for entry in told if entry is not None), None))

    def raise_alone(self, error: BaseException | None) -> None:
        """Raise the error of this rank, if there is one, without communication. May be called on one rank."""
        _raise(error, self._told(error))

    def _told(self, error: BaseException | None) -> Told | None:
        if error is None:
            return None
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            path = Path(error.filename or self._directory)
            error = disk_error("write or read", path, error, free=storage.free_bytes(path))
        if isinstance(error, CheckpointDiskError):
            return CheckpointDiskError, f"{error} {self._still_good()}"
        if isinstance(error, (CheckpointError, ValueError)):
            return type(error), str(error)
        received = f"{type(error).__name__}: {error}. {self._still_good()}"
        return CheckpointError, f"Expected a checkpoint to be written or read. Received: {received}"


def _raise(error: BaseException | None, told: Told | None) -> None:
    if isinstance(error, (CheckpointError, ValueError)) and not isinstance(error, CheckpointDiskError):
        raise error
    if told is not None:
        raise told[0](told[1]) from error
