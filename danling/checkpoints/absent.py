"""What stands in the place of a checkpoint manager that nobody has made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointNotFound


class NoCheckpoints:
    """Writes nothing and finds nothing, for a runner whose `init_checkpoint_manager` makes no manager."""

    def save_checkpoint(self, payload: object, **names: Any) -> None:
        """Write nothing."""

    def export_model(self, payload: object, **names: Any) -> None:
        """Write nothing."""

    def load_checkpoint(self, source: str | Path, **how: Any) -> NoReturn:
        """Refuse."""
        raise CheckpointNotFound(
            f"Expected a checkpoint manager to read {str(source)!r} with. Received: none, since `init_checkpoint_manager` has not set "
            "`self.checkpoint_manager`. Call super().init_checkpoint_manager() in it."
        )

    def find_latest(self) -> None:
        """Find nothing."""

    def refuse_lost(self) -> None:
        """Miss nothing."""

    def tidy(self) -> None:
        """Find no litter."""

    def check_directory(self) -> None:
        """Find nothing of another run."""

    def is_foreign(self) -> bool:
        """Find nothing of another run."""
        return False

    def begin(self, source: str | Path) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Have nothing to wait for."""

    def wait_for_mirror(self) -> None:
        """Have nothing to wait for."""

    def maybe_wait_for_staging(self) -> None:
        """Have nothing to wait for."""

    def close(self, timeout: float | None = None) -> None:
        """Have nothing to close."""
