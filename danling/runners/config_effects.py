"""Settings that do nothing on the chosen stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_identity import flatten

_SHARDED_CHECKPOINTS = ("checkpoint.dedicated_async_process_group", "checkpoint.async_process_group_backend")
_GRAPH_PATHS = ("compile.precompile_artifact_dir", "compile.memory_policy")
_OTHER_STACKS: dict[str, tuple[str, ...]] = {
    "ddp": ("parallel", "fsdp", "deepspeed", *_GRAPH_PATHS),
    "parallel": ("deepspeed", "compile.optimize_ddp"),
    "deepspeed": ("parallel", "fsdp", "compile.optimize_ddp", "checkpoint.backend", *_SHARDED_CHECKPOINTS),
}


def settings_without_effect(settings: Mapping[str, Any], defaults: Mapping[str, Any], stack: str) -> list[str]:
    """Return the keys that were changed from their defaults and that a stack does not read.

    Args:
        settings: A whole configuration as plain values.
        defaults: The same with defaults only.
        stack: `ddp`, `parallel` or `deepspeed`; another name gives none.
    """
    ignored = list(_OTHER_STACKS.get(stack, ()))
    if stack == "ddp" and settings["checkpoint"]["backend"] != "dcp":
        ignored += _SHARDED_CHECKPOINTS
    usual = flatten(defaults)
    changed = [key for key, value in flatten(settings).items() if value != usual.get(key)]
    return [key for key in changed if any(key == name or key.startswith(f"{name}.") for name in ignored)]
