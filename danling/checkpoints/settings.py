"""The policy of a checkpoint manager, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CheckpointSettings:
    """What `config.checkpoint` says.

    Attributes:
        async_mode: `"disabled"`, `"async"` or `"async_with_pinned_mem"`.
        keep_latest_k: History checkpoints to keep; 0 keeps all.
        verify: `"full"`, `"size"` or `"none"`.
        wait_timeout: Seconds to wait at close; `None` waits.
        load_only: Never write.
        trust: Read engine files by unpickling them, which runs what is in them.
        dedicated_async_process_group: Whether background saves have a process group of their own.
        async_process_group_backend: Its backend.
    """

    async_mode: str = "async"
    keep_latest_k: int = 0
    verify: str = "full"
    wait_timeout: float | None = None
    load_only: bool = False
    trust: bool = False
    dedicated_async_process_group: bool = True
    async_process_group_backend: str = "gloo"

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> CheckpointSettings:
        """Read the section; an unset `async_mode` follows `async_enabled`."""
        mode = section["async_mode"] or ("async" if section["async_enabled"] else "disabled")
        names = (
            "keep_latest_k",
            "verify",
            "wait_timeout",
            "load_only",
            "trust",
            "dedicated_async_process_group",
            "async_process_group_backend",
        )
        return cls(async_mode=mode, **{name: section[name] for name in names})

    @property
    def is_async(self) -> bool:
        """Whether saves are written in the background."""
        return self.async_mode != "disabled"
