"""The table of extensions: which setting loads which. The core imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danling.config import RunnerConfig


@dataclass(frozen=True)
class Extension:
    """A package that a run loads only when its configuration asks for it.

    Attributes:
        module: The module that attaches it to a runner.
        settings: Keys of the configuration; setting one of them loads the extension.
    """

    module: str
    settings: tuple[str, ...]


EXTENSIONS: Mapping[str, Extension] = {
    # Also loaded by `runner.audit()` and `runner.check_layout()`.
    "audit": Extension(
        "danling.audit.attach",
        ("audit.digest_interval", "audit.replay_interval", "audit.gradients.dir", "audit.until"),
    ),
    # Also loaded by the URL of a checkpoint.
    "remote": Extension("danling.remote.attach", ("checkpoint.remote.url",)),
    "torchft": Extension("danling.torchft.attach", ("ft.enabled", "checkpoint.enable_ft_dataloader_checkpoints")),
}
"""Extensions by name. `stream` is loaded by the program that imports it, `cli` by the command `danling`."""

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
    values: list[object] = [reduce(getattr, key.split("."), config) for key in EXTENSIONS[name].settings]
    return any(value is not None and value is not False for value in values)


def load(name: str) -> Any:
    """Return the module that attaches an extension."""
    return import_module(EXTENSIONS[name].module)
