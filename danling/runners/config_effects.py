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


def idle_settings(config: Any, *, evaluates: bool, step_mode: bool) -> list[str]:
    """Return a sentence for every setting that another one leaves without effect.

    Args:
        config: A whole configuration.
        evaluates: Whether there is a split to evaluate.
        step_mode: Whether the budget counts updates.
    """
    scheduler = config.get("scheduler", None) or {}
    usual = type(config)()

    def changed(name: str) -> bool:
        return bool(config.get(name) != usual.get(name))

    checks = [
        (
            changed("patience") and not evaluates,
            "patience",
            "there is no evaluation split, so nothing is scored",
        ),
        (
            config.evaluate_interval is not None and not step_mode,
            "evaluate_interval",
            "epoch mode evaluates each epoch",
        ),
        (changed("ema") and not config.ema.enabled, "ema", "ema.enabled is not set"),
        (
            config.checkpoint.export_dtype is not None and not config.checkpoint.last_save_model_only,
            "checkpoint.export_dtype",
            "checkpoint.last_save_model_only is not set",
        ),
        (
            changed("max_skipped_updates") and not config.skip_nonfinite_grad and config.precision != "fp16",
            "max_skipped_updates",
            "no update may be skipped: skip_nonfinite_grad is not set",
        ),
        (
            "monitor" in scheduler and "plateau" not in str(scheduler.get("type", "plateau")).lower(),
            "scheduler.monitor",
            "the scheduler does not go by a figure",
        ),
        (config.gc.generation != 1 and config.gc.interval is None, "gc.generation", "gc.interval is not set"),
    ]
    return [f"{name} has no effect: {reason}." for idle, name, reason in checks if idle]
