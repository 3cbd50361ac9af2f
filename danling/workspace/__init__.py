"""The directory of a run, the right to write into it, and the metadata and metrics in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .workspace import CodeIdentity, Workspace
else:
    __getattr__, __dir__ = lazily(__name__, {"workspace": ("CodeIdentity", "Workspace")})

__all__ = ["CodeIdentity", "Workspace"]
