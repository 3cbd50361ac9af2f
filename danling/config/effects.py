"""Settings that do nothing on the chosen stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from danling.utils.plain import flatten

from .stacks import STACKS

if TYPE_CHECKING:
    from .runner_config import RunnerConfig

# Settings that only one stack, or only one backend of checkpoints, reads.
_READ_BY_STACK = {"graph": ("compile.precompile_artifact_dir", "compile.memory_policy")}
_READ_BY_BACKEND = {"dcp": ("checkpoint.dedicated_async_process_group", "checkpoint.async_process_group_backend")}

_SWITCHES = {
    "checkpoint.remote": "url",
    "compile": "enable",
    "ema": "enabled",
    "ft": "enabled",
    "heartbeat": "enabled",
    "mlflow": "enabled",
    "profiling": "enabled",
    "trackio": "enabled",
    "wandb": "enabled",
}


def settings_without_effect(settings: Mapping[str, Any], defaults: Mapping[str, object], stack: str) -> list[str]:
    """Return the keys that were changed from their defaults and that a stack does not read."""
    if stack not in STACKS:
        return []
    row, backend = STACKS[stack], settings["checkpoint"]["backend"]
    if backend == "auto" or row.default_backend is None:
        backend = row.default_backend
    unread = list(row.unread)
    for reader, table in ((stack, _READ_BY_STACK), (backend, _READ_BY_BACKEND)):
        unread += [key for name, keys in table.items() if name != reader for key in keys]
    usual = flatten(defaults)
    changed = [key for key, value in flatten(settings).items() if value != usual.get(key)]
    return [key for key in changed if any(key == name or key.startswith(f"{name}.") for name in unread)]


def idle_settings(
    config: RunnerConfig,
    *,
    evaluates: bool,
    step_mode: bool,
    positioned: bool = False,
    writes_files: bool = False,
    divides_updates: bool = True,
) -> list[str]:
    """Return a sentence for every setting that another one leaves without effect."""
    scheduler = config.get("scheduler", None) or {}
    changed = list(flatten(config.changed()))
    checks = [
        ("patience" in changed and not evaluates, "patience", "there is no evaluation split, so nothing is scored"),
        (
            config.evaluate_interval is not None and not step_mode,
            "evaluate_interval",
            "epoch mode evaluates each epoch",
        ),
        (
            config.checkpoint.export_dtype is not None and not config.checkpoint.last_save_model_only,
            "checkpoint.export_dtype",
            "checkpoint.last_save_model_only is not set",
        ),
        (
            "max_skipped_updates" in changed and not config.skip_nonfinite_grad and config.precision != "fp16",
            "max_skipped_updates",
            "no update may be skipped: skip_nonfinite_grad is not set",
        ),
        (
            "monitor" in scheduler and "plateau" not in str(scheduler.get("type", "plateau")).lower(),
            "scheduler.monitor",
            "the scheduler does not follow a metric",
        ),
        (config.gc.generation != 1 and config.gc.interval is None, "gc.generation", "gc.interval is not set"),
        *_idle_group_checkpoints(config, changed),
        (
            positioned and any(key.endswith(".snapshot_every_n_steps") for key in changed),
            "dataloader.snapshot_every_n_steps",
            "the loaders built here are restored by their position",
        ),
        (
            writes_files and config.checkpoint.async_mode == "async_with_pinned_mem",
            "async_with_pinned_mem of checkpoint.async_mode",
            "a thread of this process writes files, as with 'async'; checkpoint.backend='dcp' has a process do it",
        ),
        *(
            (not divides_updates, key, "the loaders to train on are your own, which make their batches themselves")
            for key in changed
            if key.rpartition(".")[2] in ("global_batch_size", "micro_batch_size") and key.startswith("dataloader.")
        ),
        (
            not divides_updates and not evaluates and "dataloader.keyed" in changed,
            "dataloader.keyed",
            "the loaders are your own, which are seeded before each batch",
        ),
        *(_switched_off(config, changed, name, switch) for name, switch in _SWITCHES.items()),
    ]
    return _sentences(checks)


def idle_mesh_settings(config: RunnerConfig, degrees: Mapping[str, int]) -> list[str]:
    """Return a sentence for every setting of the parallel stack that the degrees leave without effect."""
    changed = list(flatten(config.changed()))
    if config.parallel.activation_checkpointing or config.compile.enable:
        # Blocks are also what is computed again, and compiled.
        changed = [key for key in changed if key != "fsdp.blocks"]
    needs = {"fsdp.": "shard", "parallel.pipeline_": "pipeline"}
    return _sentences(
        (key.startswith(prefix) and degrees[axis] == 1, key, f"parallel.axes.{axis} is 1")
        for prefix, axis in needs.items()
        for key in changed
    )


def _idle_group_checkpoints(config: RunnerConfig, changed: list[str]) -> Iterable[tuple[bool, str, str]]:
    for name in ("enable_ft_dataloader_checkpoints", "ft_dataloader_checkpoint_prefix", "ft_replica_id"):
        key = f"checkpoint.{name}"
        yield key in changed and not config.ft.enabled, key, "ft.enabled is not set"


def _switched_off(config: RunnerConfig, changed: list[str], name: str, switch: str) -> tuple[bool, str, str]:
    others = [key for key in changed if key.startswith(f"{name}.") and key != f"{name}.{switch}"]
    return bool(others) and not config[name][switch], ", ".join(others), f"{name}.{switch} is not set"


def _sentences(checks: Iterable[tuple[bool, str, str]]) -> list[str]:
    return [f"{name} has no effect: {reason}." for idle, name, reason in checks if idle]


def endless_streams(splits: Iterable[str], lengths: Mapping[str, int | None]) -> list[str]:
    """Return a sentence for every split to train on by epochs whose length is not known."""
    return [
        f"Split {split!r} is a stream of unknown length: an epoch ends when it does. For one that does not end, set `steps` instead "
        "of `epochs`."
        for split in splits
        if lengths.get(split) is None
    ]
