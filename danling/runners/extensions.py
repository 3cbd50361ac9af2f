"""The table of extensions: which setting loads which. The core imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danling.config import RunnerConfig

EXTENSIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # Also loaded by `runner.audit()` and `runner.check_layout()`.
    "audit": (
        "danling.audit.attach",
        (
            "audit.digest_interval",
            "audit.replay_interval",
            "audit.gradients.dir",
            "audit.until",
            "audit.quick",
        ),
    ),
    # Also loaded by the URL of a checkpoint.
    "remote": ("danling.remote.attach", ("checkpoint.remote.url",)),
    # Also loaded by the stack `graph`.
    "graph": ("danling.graph.compilation", ("compile.enable",)),
    "elastic": ("danling.elastic.attach", ("elastic.enabled",)),
    "torchft": (
        "danling.torchft.attach",
        ("ft.enabled", "checkpoint.enable_ft_dataloader_checkpoints"),
    ),
}
"""By name: the module that attaches an extension to a runner, and the settings that load it. `stream` is loaded by the program that
imports it, `cli` by the command `danling`."""

STACKS: Mapping[str, tuple[str, str]] = {
    "ddp": ("danling.runners.torch_runner", "TorchRunner"),
    "parallel": ("danling.runners.parallel_runner", "ParallelRunner"),
    "deepspeed": ("danling.runners.deepspeed_runner", "DeepSpeedRunner"),
    "accelerate": ("danling.runners.accelerate_runner", "AccelerateRunner"),
    "graph": ("danling.runners.graph_runner", "GraphRunner"),
}
"""Module and class by the setting `stack`. Each but `ddp` loads the extension of its name; `parallel` loads `mesh`, `graph` both."""


def is_asked(name: str, config: RunnerConfig) -> bool:
    """Whether a configuration asks for an extension."""
    values: list[object] = [reduce(getattr, key.split("."), config) for key in EXTENSIONS[name][1]]
    return any(value is not None and value is not False for value in values)


def load(name: str) -> Any:
    """Return the module that attaches an extension."""
    return import_module(EXTENSIONS[name][0])
