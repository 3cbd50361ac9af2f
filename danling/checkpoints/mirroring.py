"""What a manager tells of its saves to whoever copies them to another place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Saved:
    """A save that lies on the disk.

    Attributes:
        sequence: Number of the save, as `Record.sequence`.
        step: Committed updates.
        names: Its names, in the order in which they became visible.
        target: Name of the target, where it is a directory of files; `None` for a single file.
        own: The files of the target that this rank has written, without the manifest.
    """

    sequence: int
    step: int
    names: tuple[str, ...]
    target: str | None = None
    own: tuple[str, ...] = ()

    @property
    def may_give_way(self) -> bool:
        """Whether a newer save may take its place: it is none of the history, no best and no export."""
        return self.names == ("latest",)


class Mirror(Protocol):
    """Copies saves to another place in the background. Nothing here communicates."""

    @property
    def is_behind(self) -> bool:
        """Whether a save waits while another one is copied."""

    def saved(self, saved: Saved, *, put_off: bool = False) -> None:
        """Hear of a save, where it was written."""

    def pending(self) -> frozenset[int]:
        """Return the sequences of saves that are not copied yet: their files stay."""

    def let_go(self) -> list[str]:
        """Give up saves that wait, since the disk has no room for the next one; return their names."""

    def take_error(self) -> BaseException | None:
        """Return an error by which training is to end, once."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last save is copied, or cannot be."""

    def close(self, timeout: float | None = None) -> None:
        """Wait, and end."""
