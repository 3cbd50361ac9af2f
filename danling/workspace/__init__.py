"""The directory of a run, the right to write into it, and the metadata and metrics in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .identity import CodeIdentity, make_timestamp, run_id
    from .workspace import Workspace
else:
    __getattr__, __dir__ = lazily(
        __name__, {"identity": ("CodeIdentity", "make_timestamp", "run_id"), "workspace": ("Workspace",)}
    )

__all__ = ["CodeIdentity", "Workspace", "make_timestamp", "run_id"]
