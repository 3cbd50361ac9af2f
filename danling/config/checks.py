"""Checks of settings: values and combinations that no stack can use, and settings without an effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from danling.utils.plain import flatten

from .names import STACKS

if TYPE_CHECKING:
    from .runner_config import RunnerConfig


def check_sections(config: RunnerConfig) -> None:
    """Refuse combinations of settings that no stack can use."""
    if config.steps is not None and config.epochs is not None:
        raise ValueError(
            f"Expected steps or epochs, not both. Received: steps={config.steps}, epochs={config.epochs}. Set one of them to none."
        )
    axes = {name: value for name, value in config.parallel.axes.items() if value != 1}
    # One axis may be -1, which takes the ranks that the others leave.
    wrong = {name: value for name, value in axes.items() if value < 1 and value != -1}
    if wrong or list(axes.values()).count(-1) > 1:
        received = ", ".join(
            f"parallel.axes.{name}={value!r}" for name, value in (wrong or axes).items()
        )
        raise ValueError(
            f"Expected parallel axes to be >= 1, at most one of them -1. Received: {received}."
        )
    if config.checkpoint.export_dtype is not None:
        from danling.utils.tensors import floating_dtype  # only here, since torch takes its time

        floating_dtype(config.checkpoint.export_dtype, key="checkpoint.export_dtype")
    sections: dict[str, Mapping[str, object]] = {"dataloader": config.dataloader}
    sections |= {
        f"dataloader.{name}": own
        for name, own in config.dataloader.items()
        if isinstance(own, Mapping)
    }
    sizes = {
        place: (section.get("batch_size", None), section.get("global_batch_size", None))
        for place, section in sections.items()
    }
    twice = [place for place, both in sizes.items() if None not in both]
    if twice:
        batch, samples = sizes[twice[0]]
        raise ValueError(
            f"Expected dataloader.batch_size (samples of a batch on each rank) or dataloader.global_batch_size (samples of an update over "
            f"all ranks), not both. Received: batch_size={batch!r}, global_batch_size={samples!r} in {twice[0]}. Set one of them to none."
        )
    _check_canonical(config)
    read_memory_policy(config.compile.memory_policy)
    remote, ft = config.checkpoint.remote, config.ft
    if remote.url is not None and ft.enabled:
        raise ValueError(
            "Expected checkpoint.remote.url to be unset with ft.enabled: the files of several replica groups are not copied. Received: "
            f"checkpoint.remote.url={remote.url!r}. Unset one of them."
        )
    if ft.min_replica_size > ft.group_size:
        raise ValueError(
            f"Expected ft.min_replica_size to be at most ft.group_size. Received: ft.min_replica_size={ft.min_replica_size}, "
            f"ft.group_size={ft.group_size}."
        )


def _check_canonical(config: RunnerConfig) -> None:
    """Refuse what has another order of addition than `gradient_sum: canonical`."""
    if config.gradient_sum != "canonical":
        return
    stack, axes = config.stack_name(), config.parallel.axes
    cut = (
        ("context", "pipeline", "tensor", "expert", "expert_tensor") if stack == "parallel" else ()
    )
    wrong = [
        (stack not in ("ddp", "parallel"), f"stack={config.stack!r}", "Train on ddp or parallel"),
        (config.ft.enabled, "ft.enabled=True", "Unset it"),
        *(
            (axes[name] != 1, f"parallel.axes.{name}={axes[name]}", "Use replicate or shard")
            for name in cut
        ),
        (
            stack == "parallel" and axes.replicate != 1 and axes.shard != 1,
            f"parallel.axes.replicate={axes.replicate}, parallel.axes.shard={axes.shard}",
            "Use one of them: FSDP2 adds over replicas itself",
        ),
        (
            stack == "parallel" and config.fsdp.mp_policy is not None,
            "fsdp.mp_policy",
            "Set precision='bf16' instead",
        ),
        (
            bool(config.optim.get("fused", None)),
            "optim.fused=True",
            "Unset it: its bits depend on where tensors are cut",
        ),
    ]
    found = [(received, fix) for is_wrong, received, fix in wrong if is_wrong]
    if found:
        received, fix = found[0]
        raise ValueError(
            f"Expected settings with one order of addition at any number of processes, as gradient_sum='canonical' requires. Received: "
            f"{received}. {fix}, or set gradient_sum='fast'."
        )


def read_memory_policy(policy: str | None) -> tuple[str, float]:
    """Return the kind of a memory policy, and the share of the activations that it keeps: 1 unless the kind is `budget`."""
    kind, colon, share = (policy or "default").partition(":")
    if kind in ("default", "recompute") and not colon:
        return kind, 1.0
    try:
        budget = float(share) if kind == "budget" else math.nan
    except ValueError:
        budget = math.nan
    if 0 < budget < 1:
        return kind, budget
    # Under a budget of 0 torch draws dropout anew in the backward, which gives wrong gradients.
    raise ValueError(
        f"Expected compile.memory_policy to be 'default', 'budget:<x>' with 0 < x < 1, or 'recompute', which keeps least. Received: "
        f"compile.memory_policy={policy!r}."
    )


# A section whose switch is off has no effect.
_SWITCHES = {
    "checkpoint.remote": "url",
    "compile": "enable",
    "elastic": "enabled",
    "ema": "enabled",
    "ft": "enabled",
    "gc": "interval",
    "heartbeat": "enabled",
    "mlflow": "enabled",
    "profiling": "enabled",
    "trackio": "enabled",
    "wandb": "enabled",
}


def idle_keys_of_stack(config: RunnerConfig, stack: str) -> list[str]:
    """Return the keys that were changed from their defaults and that a stack does not read."""
    if stack not in STACKS:
        return []
    row = STACKS[stack]
    # A stack without a default writes its own kind, whatever the setting says.
    is_fixed = config.checkpoint.backend == "auto" or row.default_backend is None
    backend = row.default_backend if is_fixed else config.checkpoint.backend
    unread = list(row.unread)
    if stack != "graph":
        unread.append("compile.memory_policy")
    if backend != "dcp":
        unread += [
            "checkpoint.dedicated_async_process_group",
            "checkpoint.async_process_group_backend",
        ]
    return [
        key
        for key in flatten(config.changed())
        if any(f"{key}.".startswith(f"{name}.") for name in unread)
    ]


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
    save, scheduler = config.checkpoint, config.get("scheduler", None) or {}
    # float16 and replica groups skip updates without being asked to.
    skips = config.skip_nonfinite_grad or config.precision == "fp16" or config.ft.enabled
    keeps_positions = save.enable_ft_dataloader_checkpoints and save.ft_replica_id is not None
    no_groups = not config.ft.enabled and not keeps_positions
    without_groups = (
        "ft.enabled is not set, nor both enable_ft_dataloader_checkpoints and ft_replica_id"
    )
    plateau = "plateau" in str(scheduler.get("type", "plateau")).lower()
    own_loaders = "the loaders to train on are your own, which make their batches themselves"
    unscored = (not evaluates, "there is no evaluation split, so nothing is scored")
    reasons = {
        "patience": unscored,
        "score_mode": unscored,
        "score_name": unscored,
        "score_split": unscored,
        "evaluate_interval": (not step_mode, "epoch mode evaluates each epoch"),
        "checkpoint.export_dtype": (
            not save.last_save_model_only,
            "checkpoint.last_save_model_only is not set",
        ),
        "max_skipped_updates": (
            not skips,
            "no update may be skipped: skip_nonfinite_grad is not set",
        ),
        "scheduler.monitor": (not plateau, "the scheduler does not follow a metric"),
        "checkpoint.enable_ft_dataloader_checkpoints": (no_groups, without_groups),
        "checkpoint.ft_dataloader_checkpoint_prefix": (no_groups, without_groups),
        "checkpoint.ft_replica_id": (no_groups, without_groups),
        "checkpoint.async_mode": (
            writes_files and save.async_mode == "async_with_pinned_mem",
            "a thread of this process writes files, also with 'async_with_pinned_mem'; checkpoint.backend='dcp' has a process do it",
        ),
        "dataloader.snapshot_every_n_steps": (
            positioned,
            "the loaders built here are restored by their position",
        ),
        "dataloader.global_batch_size": (not divides_updates, own_loaders),
        "dataloader.micro_batch_size": (not divides_updates, own_loaders),
        "dataloader.keyed": (
            not divides_updates and not evaluates,
            "the loaders are your own, which are seeded before each batch",
        ),
    }
    switched_off = {
        f"{section}.": f"{section}.{switch} is not set"
        for section, switch in _SWITCHES.items()
        if not config[section][switch]
    }
    found: dict[str, list[str]] = {}
    for key in flatten(config.changed()):
        # A setting in the section of a split has the same reasons as that for all splits.
        known = f"dataloader.{key.rpartition('.')[2]}" if key.startswith("dataloader.") else key
        idle, reason = reasons.get(known, (False, ""))
        why = [text for prefix, text in switched_off.items() if key.startswith(prefix)]
        if idle or why:
            # A section that is switched off is the better reason: its fix is one key.
            found.setdefault([reason, *why][-1], []).append(key)
    return [f"{', '.join(keys)} has no effect: {reason}." for reason, keys in found.items()]


def endless_streams(splits: Iterable[str], lengths: Mapping[str, int | None]) -> list[str]:
    """Return a sentence for every split to train on by epochs whose length is not known."""
    return [
        f"Split {split!r} is a stream of unknown length: an epoch ends when it does. For one that does not end, set `steps` instead "
        "of `epochs`."
        for split in splits
        if lengths.get(split) is None
    ]
