"""The configuration of a DeepSpeed engine: what the runner derives from its own keys, and what the user gave, merged over it.

Which keys there are differs from version to version of DeepSpeed, so none are listed here: its own reader is given a configuration that
notes what it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from danling.utils.messages import did_you_mean

if TYPE_CHECKING:
    from danling.runners.deepspeed_runner import DeepSpeedRunner

_SECTIONS = (
    "zero_optimization",
    "bf16",
    "bfloat16",
    "fp16",
    "torch_autocast",
    "optimizer",
    "scheduler",
    "data_types",
)
_ADAM = ("adam", "adamw")


def engine_config(runner: DeepSpeedRunner) -> dict[str, object]:
    """Return the configuration that `deepspeed.initialize` gets.

    The runner clips, weighs and decides updates itself, so the engine is told to do none of it; every other key of DeepSpeed passes
    through as it was given.
    """
    given = runner.given_settings
    for name in _SECTIONS:
        if not isinstance(given.get(name, {}), Mapping):
            raise ValueError(
                f"Expected deepspeed.{name} to be a section. Received: deepspeed.{name}={given[name]!r}. Write its keys below it."
            )
    _refuse_contradictions(given, runner)
    micro = int(given.get("train_micro_batch_size_per_gpu") or runner.batch_size or 1)
    zero = {"stage": 0, **given.get("zero_optimization", {})}
    merged = {
        "steps_per_print": None,
        **given,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": runner.accum_steps,
        "train_batch_size": micro * runner.accum_steps * runner.data_domain.size,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    # Before the keys of the user, which may say otherwise: the runner's optimizer is not DeepSpeed's.
    if runner.optimizer is not None:
        merged = {
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **merged,
        }
    own = merged.get("optimizer", {})
    if (
        runner.device.type == "cpu"
        and "offload_optimizer" not in zero
        and str(own.get("type")).lower() in _ADAM
    ):
        # DeepSpeed's own Adam is compiled at first use; torch's is there, and its resumed runs are bitwise equal.
        merged["optimizer"] = {**own, "params": {"torch_adam": True, **(own.get("params") or {})}}
    if uses_bf16_weights(merged):
        merged.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return merged


def without_auto(value: object) -> Any:
    """Return nested mappings without the entries that are `"auto"`, by which a user says "derive it", as for other libraries."""
    if not isinstance(value, Mapping):
        return value
    return {key: without_auto(item) for key, item in value.items() if item != "auto"}


def zero_stage(settings: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration, 0 without one."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))


def uses_bf16_weights(settings: Mapping[str, Any]) -> bool:
    """Whether the engine keeps the weights themselves in bfloat16, with a float32 copy for the optimizer."""
    return bool((settings.get("bf16") or settings.get("bfloat16", {})).get("enabled", False))


def _refuse_contradictions(given: Mapping[str, Any], runner: DeepSpeedRunner) -> None:
    accum_steps, precision = runner.accum_steps, runner.config.precision
    micro = runner.batch_size or given.get("train_micro_batch_size_per_gpu")
    whole = None if micro is None else int(micro) * accum_steps * runner.data_domain.size
    expected = [
        ("train_micro_batch_size_per_gpu", "dataloader.batch_size", runner.batch_size),
        ("gradient_accumulation_steps", "accum_steps", accum_steps),
        ("gradient_clipping", "max_grad_norm", runner.config.max_grad_norm),
        ("train_batch_size", "dataloader.batch_size * accum_steps * world size", whole),
    ]
    for key, own_key, value in expected:
        if key in given and value is not None and given[key] != value:
            raise _contradiction(key, given[key], own_key, value, f"Leave deepspeed.{key} out")
    for key in ("fp16", "torch_autocast"):
        if given.get(key, {}).get("enabled", False):
            fix = "Set precision, which autocasts and scales the loss"
            raise _contradiction(f"{key}.enabled", True, "precision", precision, fix)
    in_bf16 = uses_bf16_weights(given)
    if in_bf16 and precision == "fp16":
        raise _contradiction("bf16.enabled", True, "precision", precision, "Choose one of them")
    if in_bf16 and zero_stage(given) == 0:
        # Without ZeRO the engine makes its own step when it is built, and the run diverges.
        fix = "Set deepspeed.zero_optimization.stage to 1, 2 or 3, or precision=bf16 to autocast"
        raise _contradiction("bf16.enabled", True, "deepspeed.zero_optimization.stage", 0, fix)
    for key, section in (("optimizer", "optim"), ("scheduler", "scheduler")):
        own, kind = getattr(runner, key), (runner.config.get(section) or {}).get("type")
        # A scheduler is built from its section after the engine.
        if key in given and (own is not None or (kind and key == "scheduler")):
            # A type in the configuration is what the user can change.
            source = f"{section}.type={kind!r}" if kind else f"self.{key}, a {type(own).__name__}"
            raise ValueError(
                f"Expected one {key}. Received: deepspeed.{key}={given[key]!r} and {source}. Keep one of them."
            )
    if given.get("managed_gradient_accumulation") is False:
        raise _contradiction(
            "managed_gradient_accumulation", False, "accum_steps", accum_steps, "Leave it out"
        )


def _contradiction(
    key: str, value: object, own_key: str, own_value: object, fix: str
) -> ValueError:
    return ValueError(
        f"Expected deepspeed.{key} to agree with {own_key}. Received: deepspeed.{key}={value!r}, {own_key}={own_value!r}. {fix}."
    )


# What DeepSpeed would ignore or refuse

_READ_LATER = [
    "autotuning",
    "checkpoint",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "elasticity",
]
"""Sections of which the reader looks at a part only, as other parts of them ask for it."""


class _Noted(dict[str, Any]):
    """A mapping that remembers which keys it was asked for."""

    def __init__(self, values: Mapping[str, object]) -> None:
        super().__init__(
            {key: _Noted(v) if isinstance(v, Mapping) else v for key, v in values.items()}
        )
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
        """Return the keys as a view whose `in` counts as asking: the mapping itself."""
        return self


def check_keys(given: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Raise a `ValueError` that names what DeepSpeed would ignore or refuse. Imports DeepSpeed; may be called on one rank."""
    # Follows from the other sizes and from the number of ranks, which the reader learns only when the engine is built.
    noted = _Noted({key: value for key, value in settings.items() if key != "train_batch_size"})
    try:
        import_module("deepspeed.runtime.config").DeepSpeedConfig(noted)
    except Exception as error:
        raise ValueError(_refused(error, given)) from error
    unknown: list[tuple[tuple[str, ...], set[str]]]
    unknown = [((key,), noted.asked) for key in given if key not in noted.asked]
    for key, value in given.items():
        section = dict.get(noted, key)
        # A section that nothing was asked of was handed on as a whole, and is checked by what takes it.
        if (
            isinstance(value, Mapping)
            and key not in _READ_LATER
            and isinstance(section, _Noted)
            and section.asked
        ):
            unknown += [((key, name), section.asked) for name in value if name not in section.asked]
    for path, known in unknown:
        raise ValueError(
            f"Expected a key that DeepSpeed {import_module('deepspeed').__version__} knows. Received: deepspeed.{'.'.join(path)}, which "
            f"it would ignore.{did_you_mean(path[-1], known)} Correct it, or leave it out."
        )


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
        holders = [
            name
            for name, section in given.items()
            if isinstance(section, Mapping) and place[0] in section
        ]
        place = [*holders[:1], *place]
    path = ".".join(("deepspeed", *place))
    return f"Expected a value of {path} that DeepSpeed takes. Received: {path}={first['input']!r}. {first['msg']}."
