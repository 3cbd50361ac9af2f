"""Configuration: every setting of a run, its checks, its command line and its identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from .runner_config import RunnerConfig
else:
    __getattr__, __dir__ = lazily(__name__, {"runner_config": ("RunnerConfig",)})

__all__ = ["RunnerConfig"]
