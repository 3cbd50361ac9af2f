"""What copies complete saves to another place, such as an object store: the manager reports to it, and knows nothing else of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .manifest import Record


@dataclass(frozen=True)
class Saved:
    """A save that is complete on the disk.

    Attributes:
        sequence: Number of the save, as `Record.sequence`.
        names: Its names, in the order in which they became visible.
        target: Name of the target; `None` for a single file.
        own: The files of the target that this rank has written, without the manifest.
    """

    sequence: int
    step: int
    names: tuple[str, ...]
    target: str | None = None
    own: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        record: Record,
        names: Iterable[str],
        *,
        target: str | None = None,
        own: Iterable[str] = (),
    ) -> Saved:
        """Return the save of a record."""
        return cls(record.sequence, record.step, tuple(names), target, tuple(own))

    @property
    def may_give_way(self) -> bool:
        """Whether a newer save may take its place: it is no history, no best and no export."""
        return self.names == ("latest",)


class SaveCopier:
    """Copies saves, on all ranks or on none. This one copies none; `danling.remote.mirror.RunMirror` copies them to an object store.

    No method communicates.
    """

    copies = False
    """Whether there is another place; all ranks have the same."""

    @property
    def is_behind(self) -> bool:
        """Whether a save waits while another one is copied."""
        return False

    def saved(self, saved: Saved, *, put_off: bool = False) -> None:
        """Take note of a save, on a rank that has written a part of it, maybe in the background."""

    def pending(self) -> frozenset[int]:
        """Return the sequences of saves that are not copied yet, which retention keeps."""
        return frozenset()

    def drop_pending(self) -> list[str]:
        """Give up saves that wait, since the disk has no room for the next one; return their names."""
        return []

    def take_error(self) -> BaseException | None:
        """Return an error by which training is to end, once."""
        return None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the last save is copied, or cannot be."""

    def close(self, timeout: float | None = None) -> None:
        """Wait, and end."""
