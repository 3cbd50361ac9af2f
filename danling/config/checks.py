"""Checks of values and of combinations of settings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .hints import ENGINE_KEYS, slip_of

if TYPE_CHECKING:
    from .runner_config import RunnerConfig


_SMALLEST_PART = 5 << 20


def check_sections(config: RunnerConfig) -> None:
    """Refuse values and combinations that no stack can use."""
    _check_axes(config)
    _check_names(config)
    _check_export(config)
    _check_batches(config)
    _check_remote(config)
    read_memory_policy(config.compile.memory_policy)
    if "fp8" in config and isinstance(config["fp8"], Mapping):
        raise ValueError(
            f"Expected no section fp8: the library trains in float32, bfloat16 and float16. Received: fp8={dict(config['fp8'])!r}. Set "
            "precision='bf16', or convert the model yourself at the end of __init__, as torchao's convert_to_float8_training does."
        )
    if not config.ema.decay < 1:
        raise ValueError(f"Expected ema.decay to be a number < 1. Received: ema.decay={config.ema.decay!r}.")
    if config.gc.generation > 2:
        raise ValueError(f"Expected gc.generation to be 0, 1 or 2. Received: gc.generation={config.gc.generation!r}.")
    if config.ft.min_replica_size > config.ft.group_size:
        raise ValueError(
            f"Expected ft.min_replica_size to be at most ft.group_size. Received: ft.min_replica_size="
            f"{config.ft.min_replica_size}, ft.group_size={config.ft.group_size}."
        )


def _check_remote(config: RunnerConfig) -> None:
    remote = config.checkpoint.remote
    if remote.part_size < _SMALLEST_PART:
        raise ValueError(
            f"Expected checkpoint.remote.part_size to be at least {_SMALLEST_PART} bytes (5 MiB), which S3 requires. Received: "
            f"checkpoint.remote.part_size={remote.part_size}. Give a larger one."
        )
    if remote.url is not None and config.ft.enabled:
        raise ValueError(
            "Expected checkpoint.remote.url to be unset with ft.enabled: the files of several replica groups are not copied. Received: "
            f"checkpoint.remote.url={remote.url!r}. Unset one of them."
        )


def _check_axes(config: RunnerConfig) -> None:
    axes = {name: value for name, value in config.parallel.axes.items() if value != 1}
    wrong = {name: value for name, value in axes.items() if value < 1 and value != -1}
    if wrong or list(axes.values()).count(-1) > 1:
        received = ", ".join(f"parallel.axes.{name}={value!r}" for name, value in (wrong or axes).items())
        raise ValueError(f"Expected parallel axes to be >= 1, at most one of them -1. Received: {received}.")


def _check_names(config: RunnerConfig) -> None:
    for name in config.deepspeed:
        slip = slip_of(name, ENGINE_KEYS)
        if slip:
            raise ValueError(
                f"Expected keys that DeepSpeed reads. Received: deepspeed.{name}. Did you mean 'deepspeed.{slip}'?"
            )
    interval = config.scheduler.get("interval")
    if interval not in (None, "step", "epoch", "validation"):
        raise ValueError(
            f"Expected scheduler.interval to be 'step', 'epoch' or 'validation'. Received: scheduler.interval={interval!r}."
        )


def _check_export(config: RunnerConfig) -> None:
    if config.checkpoint.export_dtype is not None:
        from danling.utils.tensors import floating_dtype  # only here, since torch takes its time

        floating_dtype(config.checkpoint.export_dtype, key="checkpoint.export_dtype")


def _check_batches(config: RunnerConfig) -> None:
    sections = {"dataloader": config.get("dataloader", None) or {}}
    sections |= {f"dataloader.{name}": own for name, own in sections["dataloader"].items() if isinstance(own, Mapping)}
    for place, section in sections.items():
        if any(section.get(name, None) is not None for name in ("global_batch_size", "micro_batch_size")):
            from danling.data.batching import check_sizes  # only here, since torch takes its time

            check_sizes(section, place)


_CLOCK = re.compile(r"(?:(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)\Z")


def seconds_of(key: str, limit: float | str) -> float:
    """Return the seconds of a number, of its text, or of `MM:SS` or `HH:MM:SS`."""
    clock = _CLOCK.match(limit) if isinstance(limit, str) else None
    try:
        seconds = (
            float(limit)
            if clock is None
            else sum(float(part or 0) * unit for part, unit in zip(clock.groups(), (3600, 60, 1)))
        )
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"Expected {key} to be seconds or 'HH:MM:SS'. Received: {key}={limit!r}.")
    return seconds


POLICIES = ("default", "budget", "recompute")


def read_memory_policy(policy: str | None) -> tuple[str, float]:
    """Return the kind of a memory policy, one of `POLICIES`, and the share of the activations that it keeps: 1 unless it is a budget."""
    kind, colon, share = (policy or "default").partition(":")
    if kind in ("default", "recompute") and not colon:
        return kind, 1.0
    try:
        budget = float(share) if kind == "budget" else math.nan
    except ValueError:
        budget = math.nan
    if 0 < budget < 1:
        return kind, budget
    reason = ""
    if budget == 0:
        reason = " Under a budget of 0 torch draws dropout anew in the backward, which gives wrong gradients; 'recompute' keeps little."
    elif kind == "offload":
        reason = " Nothing is offloaded: 'recompute' keeps little in memory."
    elif budget == 1:
        reason = " A budget of 1 is 'default'."
    raise ValueError(
        f"Expected compile.memory_policy to be 'default', 'budget:<x>' with 0 < x < 1, or 'recompute'. Received: "
        f"compile.memory_policy={policy!r}.{reason}"
    )
