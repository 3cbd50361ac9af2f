"""The configuration of a DeepSpeed engine: what the runner derives from its own keys, and what the user gave, merged over it.

Which keys there are differs from version to version of DeepSpeed, so none are listed here: its own reader is given a configuration that
notes what it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from danling.utils.messages import did_you_mean

AUTO = "auto"
"""The value by which a user says "derive it", as in the integrations of other libraries."""


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


def _refuse_contradictions(given: Mapping[str, Any], facts: EngineFacts) -> None:
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
    for key in ("fp16", "torch_autocast"):
        if (given.get(key) or {}).get("enabled", False):
            raise _contradiction(
                f"deepspeed.{key}.enabled",
                True,
                "precision",
                facts.precision,
                "Set precision, which autocasts and scales the loss",
            )
    in_bf16 = uses_bf16_weights(given)
    if in_bf16 and str(facts.precision).lower() in ("fp16", "float16"):
        raise _contradiction("deepspeed.bf16.enabled", True, "precision", facts.precision, "Choose one of them")
    if in_bf16 and zero_stage(given) == 0:
        # Without ZeRO the engine makes its own step when it is built, and the run diverges.
        mend = "Set deepspeed.zero_optimization.stage to 1, 2 or 3, or precision=bf16 to autocast"
        raise _contradiction("deepspeed.bf16.enabled", True, "deepspeed.zero_optimization.stage", 0, mend)
    for key, source in (("optimizer", facts.optimizer), ("scheduler", facts.scheduler)):
        if key in given and source is not None:
            raise ValueError(
                f"Expected one {key}. Received: deepspeed.{key}={given[key]!r} and {source}. Keep one of them."
            )
    if given.get("managed_gradient_accumulation") is False:
        raise _contradiction(
            "deepspeed.managed_gradient_accumulation", False, "accum_steps", facts.accum_steps, "Leave it out"
        )


def _contradiction(key: str, value: object, own_key: str, own_value: object, mend: str) -> ValueError:
    return ValueError(
        f"Expected {key} to agree with {own_key}. Received: {key}={value!r}, {own_key}={own_value!r}. {mend}."
    )


# What DeepSpeed would ignore or refuse

_SECTIONS = ("zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast", "optimizer", "scheduler", "data_types")
_READ_LATER = (
    "autotuning",
    "checkpoint",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "elasticity",
)
"""Sections of which the reader looks at a part only, as other parts of them ask for it."""


class _Noted(dict[str, Any]):
    """A mapping that remembers which keys it was asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__({key: _Noted(v) if isinstance(v, Mapping) else v for key, v in values.items()})
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        # Without its own method, a call with `**section` would take the values past `__getitem__`.
        return super().__iter__()

    def __getitem__(self, key: str) -> object:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> Any:
        """Return a value, or the default."""
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the keys as a view whose `in` counts as asking."""
        return _NotedKeys(self)


class _NotedKeys:
    def __init__(self, values: _Noted) -> None:
        self._values = values

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def check_keys(given: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Raise a `ValueError` that names what DeepSpeed would ignore or refuse. Imports DeepSpeed; may be called on one rank."""
    for name in _SECTIONS:
        if name in given and not isinstance(given[name], Mapping):
            raise ValueError(
                f"Expected deepspeed.{name} to be a section. Received: deepspeed.{name}={given[name]!r}. Write its keys below it."
            )
    # Follows from the other sizes and from the number of ranks, which the reader learns only when the engine is built.
    noted = _Noted({key: value for key, value in settings.items() if key != "train_batch_size"})
    try:
        import_module("deepspeed.runtime.config").DeepSpeedConfig(noted)
    except Exception as error:
        raise ValueError(_refused(error, given)) from error
    for path, known in _unknown(given, noted):
        raise ValueError(
            f"Expected a key that DeepSpeed {import_module('deepspeed').__version__} knows. Received: {'.'.join(path)}, which it would "
            f"ignore.{did_you_mean(path[-1], known)} Correct it, or leave it out."
        )


def _unknown(given: Mapping[str, object], noted: _Noted) -> Iterator[tuple[Sequence[str], set[str]]]:
    for key, value in given.items():
        if key not in noted.asked:
            yield ("deepspeed", key), noted.asked
        inner = dict.get(noted, key)
        # A section that nothing was asked of was handed on as a whole, and is checked by what takes it.
        if isinstance(value, Mapping) and key not in _READ_LATER and isinstance(inner, _Noted) and inner.asked:
            for name in value:
                if name not in inner.asked:
                    yield ("deepspeed", key, name), inner.asked


def _refused(error: Exception, given: Mapping[str, object]) -> str:
    """Return what to say of an error of DeepSpeed's reader, which names a place within a section at the most."""
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return (
            f"Expected a configuration that DeepSpeed takes. Received: {type(error).__name__}: {error}. Look at the keys under "
            "`deepspeed`."
        )
    first = problems()[0]
    place = list(map(str, first["loc"]))
    if place and place[0] not in given:  # none where keys of a section contradict each other
        place[:0] = [name for name, section in given.items() if isinstance(section, Mapping) and place[0] in section][
            :1
        ]
    path = ".".join(("deepspeed", *place))
    return f"Expected a value of {path} that DeepSpeed takes. Received: {path}={first['input']!r}. {first['msg']}."
