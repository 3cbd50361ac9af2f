"""The configuration of a DeepSpeed engine: what the runner derives from its own keys, and what the user gave, merged over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""Stands for "derive it" in a value that the user gives, as in the integrations of other libraries."""


@dataclass(frozen=True)
class EngineFacts:
    """What the runner knows of a run before there is an engine.

    Attributes:
        micro_batch: Samples of a micro-batch on each rank; `None` when the loader does not say.
        accum_steps: Micro-batches of an update on each rank.
        world_size: Number of data-parallel ranks.
        precision: Autocast precision: `None`, `"bf16"`, `"fp16"` or another name of these.
        max_grad_norm: Norm to clip to, or `None`.
        optimizer: Where the optimizer comes from and what it is (`"optim.type='adamw'"`), `None` when there is none yet.
        scheduler: The same of the scheduler.
        on_cpu: Whether the engine runs on the CPU.
    """

    micro_batch: int | None
    accum_steps: int
    world_size: int
    precision: str | None
    max_grad_norm: float | None
    optimizer: str | None
    scheduler: str | None
    on_cpu: bool


def engine_config(given: Mapping[str, object], facts: EngineFacts) -> dict[str, object]:
    """Return the configuration that `deepspeed.initialize` gets.

    The runner clips, weighs and decides updates itself, so the engine is told to do none of it; every other key of DeepSpeed passes
    through as it was given.
    """
    own = without_auto(given)
    zero = own.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(
            f"Expected deepspeed.zero_optimization to be a section. Received: deepspeed.zero_optimization={zero!r}. Set "
            "deepspeed.zero_optimization.stage."
        )
    _refuse_contradictions(own, facts)
    merged = {**own, "gradient_accumulation_steps": facts.accum_steps, "gradient_clipping": 0.0}
    micro = int(own.get("train_micro_batch_size_per_gpu") or facts.micro_batch or 1)
    merged["train_micro_batch_size_per_gpu"] = micro
    merged["train_batch_size"] = micro * facts.accum_steps * facts.world_size
    merged["zero_optimization"] = {"stage": 0, **zero}
    merged.setdefault("steps_per_print", None)
    if facts.optimizer is not None:
        merged.setdefault("zero_allow_untested_optimizer", True)
        merged.setdefault("zero_force_ds_cpu_optimizer", False)
    if "optimizer" in merged and facts.on_cpu and "offload_optimizer" not in merged["zero_optimization"]:
        merged["optimizer"] = _with_torch_adam(merged["optimizer"])
    if uses_bf16_weights(merged):
        merged.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return merged


def without_auto(value: object) -> Any:
    """Return nested mappings without the entries that are `"auto"`."""
    if not isinstance(value, Mapping):
        return value
    return {key: without_auto(item) for key, item in value.items() if item != AUTO}


def zero_stage(settings: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration, 0 without one."""
    return int((settings.get("zero_optimization") or {}).get("stage", 0))


def uses_bf16_weights(settings: Mapping[str, Any]) -> bool:
    """Whether the engine keeps the weights themselves in bfloat16, with a float32 copy for the optimizer."""
    return bool((settings.get("bf16") or settings.get("bfloat16") or {}).get("enabled", False))


def clip_norm(given: Mapping[str, object], max_grad_norm: float | None) -> float | None:
    """Return the norm that gradients are clipped to: `max_grad_norm`, else `deepspeed.gradient_clipping`, else `None`."""
    if max_grad_norm is not None:
        return max_grad_norm
    asked = without_auto(given).get("gradient_clipping")
    return float(asked) if asked else None


def _with_torch_adam(optimizer: Mapping[str, Any]) -> dict[str, object]:
    # DeepSpeed's own Adam is compiled at first use; torch's is there, and its resumed runs are bitwise equal.
    if str(optimizer.get("type", "")).lower() not in ("adam", "adamw"):
        return dict(optimizer)
    return {**optimizer, "params": {"torch_adam": True, **(optimizer.get("params") or {})}}


def _refuse_contradictions(given: Mapping[str, object], facts: EngineFacts) -> None:
    _refuse_other_sizes(given, facts)
    _refuse_other_precision(given, facts)
    for key, source in (("optimizer", facts.optimizer), ("scheduler", facts.scheduler)):
        if key in given and source is not None:
            raise ValueError(
                f"Expected one {key}. Received: deepspeed.{key}={given[key]!r} and {source}. Keep one of them."
            )
    if given.get("managed_gradient_accumulation") is False:
        raise _contradiction(
            "deepspeed.managed_gradient_accumulation", False, "accum_steps", facts.accum_steps, "Leave it out"
        )


def _refuse_other_sizes(given: Mapping[str, Any], facts: EngineFacts) -> None:
    micro = facts.micro_batch or given.get("train_micro_batch_size_per_gpu")
    expected = [
        ("train_micro_batch_size_per_gpu", "dataloader.batch_size", facts.micro_batch),
        ("gradient_accumulation_steps", "accum_steps", facts.accum_steps),
        ("gradient_clipping", "max_grad_norm", facts.max_grad_norm),
    ]
    if micro is not None:
        whole = int(micro) * facts.accum_steps * facts.world_size
        expected.append(("train_batch_size", "dataloader.batch_size * accum_steps * world size", whole))
    for key, own_key, value in expected:
        if key in given and value is not None and given[key] != value:
            raise _contradiction(f"deepspeed.{key}", given[key], own_key, value, f"Leave deepspeed.{key} out")


def _refuse_other_precision(given: Mapping[str, Any], facts: EngineFacts) -> None:
    for key in ("fp16", "torch_autocast"):
        if (given.get(key) or {}).get("enabled", False):
            raise _contradiction(
                f"deepspeed.{key}.enabled",
                True,
                "precision",
                facts.precision,
                "Set precision, which autocasts and scales the loss",
            )
    if not uses_bf16_weights(given):
        return
    if str(facts.precision).lower() in ("fp16", "float16"):
        raise _contradiction("deepspeed.bf16.enabled", True, "precision", facts.precision, "Choose one of them")
    if zero_stage(given) == 0:
        # Without ZeRO the engine makes a step of its own when it is built, and the run diverges.
        mend = "Set deepspeed.zero_optimization.stage to 1, 2 or 3, or precision=bf16 to autocast"
        raise _contradiction("deepspeed.bf16.enabled", True, "deepspeed.zero_optimization.stage", 0, mend)


def _contradiction(key: str, value: object, own_key: str, own_value: object, mend: str) -> ValueError:
    return ValueError(
        f"Expected {key} to agree with {own_key}. Received: {key}={value!r}, {own_key}={own_value!r}. {mend}."
    )
