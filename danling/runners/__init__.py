"""Who runs: the contract, the stacks, and the dispatch between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from danling.utils.lazy import lazily

if TYPE_CHECKING:
    from danling.config import RunnerConfig

    from .accelerate_runner import AccelerateRunner
    from .base_runner import BaseRunner
    from .deepspeed_runner import DeepSpeedRunner
    from .graph_runner import GraphRunner
    from .meta import MetaRunner
    from .parallel_runner import ParallelRunner
    from .runner import Runner
    from .state import RunnerState
    from .torch_runner import TorchRunner
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "accelerate_runner": ("AccelerateRunner",),
            "base_runner": ("BaseRunner",),
            "danling.config": ("RunnerConfig",),
            "deepspeed_runner": ("DeepSpeedRunner",),
            "graph_runner": ("GraphRunner",),
            "meta": ("MetaRunner",),
            "parallel_runner": ("ParallelRunner",),
            "runner": ("Runner",),
            "state": ("RunnerState",),
            "torch_runner": ("TorchRunner",),
        },
    )

__all__ = [
    "AccelerateRunner",
    "BaseRunner",
    "DeepSpeedRunner",
    "GraphRunner",
    "MetaRunner",
    "ParallelRunner",
    "Runner",
    "RunnerConfig",
    "RunnerState",
    "TorchRunner",
]
