"""The process group that is formed again in place: the one file that touches torch's experimental interface for it (torch >= 2.14)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

OLDEST = "2.14"
"""The first release of torch whose gloo groups can be formed again."""
_MOST_MEMBERS = 1 << 20
"""The number for life of a member is its rank at the beginning; torch takes the size as a bound only."""
_LEAVE_SECONDS = 5.0
_PAUSE_SECONDS = 0.01


def is_supported() -> bool:
    """Whether this torch can form a group again."""
    return all(hasattr(dist, name) for name in ("_reconfigure", "_get_reconfigure_handle"))


def check_supported() -> None:
    """Refuse a torch that cannot.

    Raises:
        ValueError: With the version that is needed.
    """
    if not is_supported():
        raise ValueError(
            f"Expected torch {OLDEST} or newer for elastic ranks, whose process groups are formed again in place. Received: torch "
            f"{torch.__version__}. Install a newer one, or start the program with torchrun and unset elastic.enabled."
        )


class Group:
    """The default process group of a member, over gloo. It has no connection before `form`.

    Args:
        store: A store that outlives every member.
        member: The number of this process, never used by another one.
        timeout: How long a collective waits for a member that neither answers nor ends.
    """

    def __init__(self, store: Any, member: int, timeout: timedelta) -> None:
        check_supported()
        options: dict[str, Any] = {"enable_reconfigure": True}
        dist.init_process_group(
            "gloo", store=store, rank=member, world_size=_MOST_MEMBERS, timeout=timeout, **options
        )
        self._member = member

    def leave(self) -> str:
        """Close every connection, and return the handle with which this member can be taken into the next group.

        gloo's `abort` does nothing: a group of one in the place of the group closes its sockets, and a rank that waits for this member
        wakes.
        Nothing may keep an exception of a collective: its traceback holds the frames, they hold the work, and that holds the sockets.
        """
        while True:
            try:
                # Negative and never twice: the others are generations.
                alone = -1 - self._member - _MOST_MEMBERS * (time.monotonic_ns() // 1000)
                self._reconfigure(alone, [self.handle()], _LEAVE_SECONDS)
                return self.handle()
            except RuntimeError:
                pass
            time.sleep(_PAUSE_SECONDS)

    def form(self, generation: int, handles: Sequence[str], patience: float) -> None:
        """Connect to the members with these handles, in the order of their ranks.

        Args:
            generation: Never used twice.
            handles: Those of all members, this one included.
            patience: Seconds to wait for a member that does not come.

        Raises:
            RuntimeError: If a member does not come. Nothing is changed but that old connections may be gone.
        """
        self._reconfigure(generation, handles, patience)

    @staticmethod
    def handle() -> str:
        """Return what the others connect to; each success changes it."""
        found: str = dist._get_reconfigure_handle()  # type: ignore[attr-defined, unused-ignore]
        return found

    @staticmethod
    def _reconfigure(uuid: int, handles: Sequence[str], seconds: float) -> None:
        timeout = timedelta(seconds=seconds)
        dist._reconfigure(uuid=uuid, handles=list(handles), timeout=timeout).wait()  # type: ignore[attr-defined, unused-ignore]
