"""Who runs: the contract, the stacks, and the dispatch between them."""

from __future__ import annotations

from .base_runner import BaseRunner
from .config import RunnerConfig
from .meta import MetaRunner
from .runner import Runner
from .state import RunnerState
from .torch_runner import TorchRunner

__all__ = ["BaseRunner", "MetaRunner", "Runner", "RunnerConfig", "RunnerState", "TorchRunner"]
