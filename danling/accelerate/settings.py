"""What Accelerate is told: by the section `accelerate`, a file of `accelerate config`, and its environment.

What the library decides itself is refused under Accelerate's names too, with the key that says it here.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Literal, cast

from danling.utils.messages import did_you_mean

AutocastPrecision = Literal["fp16", "bf16"]

_PLUGINS = {
    "deepspeed": "Set stack='deepspeed', whose section `deepspeed` takes the same configuration.",
    "megatron": "Set stack='deepspeed' or stack='parallel', which divide a model themselves.",
    "fsdp": "Set stack='parallel' and parallel.axes.shard, which is FSDP2; on the CPU Accelerate would train each rank alone.",
    "parallelism": "Set stack='parallel' and the degrees under parallel.axes.",
}
_COMPILES = "Set compile.enable and compile.backend, which keep the names of parameters."
_OF_THE_LIBRARY = {
    "gradient_accumulation_steps": "Set accum_steps, which weighs each micro-batch.",
    "gradient_accumulation_plugin": "Set accum_steps, which weighs each micro-batch.",
    "step_scheduler_with_optimizer": "Set scheduler.interval.",
    "split_batches": "Set dataloader.global_batch_size.",
    "dataloader_config": "Use the settings under dataloader.",
    "rng_types": "Set seed: every random stream is the library's.",
    "device_placement": "Leave it out: the library places models and batches.",
    "log_with": "Set tensorboard or wandb.enabled, or call runner.add_tracker.",
    "project_dir": "Set dir.",
    "project_config": "Set dir.",
    "kwargs_handlers": "Override `accelerate_kwargs`, which may return objects.",
    "dynamo_backend": _COMPILES,
    "dynamo_plugin": _COMPILES,
    "dynamo_config": _COMPILES,
    "deepspeed_plugin": _PLUGINS["deepspeed"],
    "deepspeed_plugins": _PLUGINS["deepspeed"],
    "deepspeed_config": _PLUGINS["deepspeed"],
    "megatron_lm_plugin": _PLUGINS["megatron"],
    "megatron_lm_config": _PLUGINS["megatron"],
    "fsdp_plugin": _PLUGINS["fsdp"],
    "fsdp_config": _PLUGINS["fsdp"],
    "torch_tp_plugin": _PLUGINS["parallelism"],
    "parallelism_config": _PLUGINS["parallelism"],
    "fp8_config": "Start with `accelerate launch --config_file`, which reads it, or return a recipe from `accelerate_kwargs`.",
}
_OF_THE_ENVIRONMENT = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_DYNAMO_BACKEND": "dynamo_backend",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
_DISTRIBUTED_TYPES = {
    "DEEPSPEED": _PLUGINS["deepspeed"],
    "MEGATRON_LM": _PLUGINS["megatron"],
    "FSDP": _PLUGINS["fsdp"],
    "XLA": "Set stack='ddp' on another device: the collectives of an update go through torch.distributed, of which XLA has none here.",
    "TPU": "Set stack='ddp' on another device: the collectives of an update go through torch.distributed, of which XLA has none here.",
}
_HANDLERS = {
    "AutocastKwargs": "Set precision, or override `forward_context`.",
    "GradScalerKwargs": "Set precision='fp16', whose scaler is runner.precision.scaler.",
    "InitProcessGroupKwargs": "Set backend, init_method or comm.init_timeout_seconds.",
    "ProfileKwargs": "Set profiling.enabled.",
}
"""Handlers of what Accelerate is not asked for here, which it would take and never use."""
_NEUTRAL = ("", "no", "none", "false", "0", "1", "{}", "[]")
"""What a setting of the library's may be under Accelerate's name: nothing that it would do."""
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class AccelerateSettings:
    """The settings for Accelerate, without those that the library's own keys replace.

    Attributes:
        precision: Autocast of the run: `config.precision`, else what Accelerate was told.
        fp8: Whether Accelerate is to train in fp8, which it does itself.
        cpu: Whether the CPU is asked for, also where there is another device.
        num_processes: Number of processes that its file says, `None` without one.
    """

    precision: AutocastPrecision | None = None
    fp8: bool = False
    cpu: bool = False
    num_processes: int | None = None


def read_settings(
    section: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    precision: AutocastPrecision | None,
    accum_steps: int,
) -> AccelerateSettings:
    """Return what a section or file of Accelerate's and its environment ask for."""
    _check_known(section)
    own = {"accum_steps": accum_steps, "stack": "accelerate"}
    for name, value in section.items():
        if name in _OF_THE_LIBRARY and _asks(value):
            raise _decided(f"accelerate.{name}={value!r}", name, own)
    for variable, name in _OF_THE_ENVIRONMENT.items():
        if _asks(environment.get(variable)):
            raise _decided(f"{variable}={environment[variable]!r}", name, own)
    kind = str(section.get("distributed_type") or "").upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind in _DISTRIBUTED_TYPES:
        raise ValueError(
            "Expected a distributed type of one copy of the model a process. Received: accelerate.distributed_type="
            f"{section['distributed_type']!r} with stack='accelerate'. {_DISTRIBUTED_TYPES[kind]}"
        )
    asked = _mixed_precision(section, environment)
    if precision is not None and asked is not None and asked[1] != precision:
        raise ValueError(
            f"Expected one precision. Received: precision={precision!r} and {asked[0]}={asked[1]!r}. Leave one of them out."
        )
    fp8 = asked is not None and asked[1] == "fp8"
    processes = section.get("num_processes")
    return AccelerateSettings(
        precision=precision if fp8 or asked is None else cast(AutocastPrecision, asked[1]),
        fp8=fp8,
        cpu=any(map(_asks, (section.get("cpu"), section.get("use_cpu"), environment.get("ACCELERATE_USE_CPU")))),
        num_processes=None if processes in (None, -1) else int(str(processes)),
    )


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse further arguments of `Accelerator` that the library decides, or that would have no effect."""
    for name, value in arguments.items():
        if name in ("cpu", "mixed_precision"):
            raise ValueError(
                f"Expected accelerate.{name} in the configuration. Received: {name}={value!r} from accelerate_kwargs. Set it there."
            )
        if name in _OF_THE_LIBRARY and name != "kwargs_handlers":
            raise ValueError(
                f"Expected the library to decide this. Received: {name} from accelerate_kwargs. {_OF_THE_LIBRARY[name]}"
            )
    handlers = arguments.get("kwargs_handlers")
    for handler in handlers if isinstance(handlers, (list, tuple)) else ():
        kind = type(handler).__name__
        if kind in _HANDLERS:
            raise ValueError(
                f"Expected handlers of what Accelerate does here. Received: {kind} from accelerate_kwargs. {_HANDLERS[kind]}"
            )


def _check_known(section: Mapping[str, object]) -> None:
    if not section:
        return
    accelerator = import_module("accelerate").Accelerator
    cluster = import_module("accelerate.commands.config.config_args").ClusterConfig
    known = {*inspect.signature(accelerator).parameters, *(field.name for field in fields(cluster))}
    for name in section:
        if name not in known:
            raise ValueError(
                "Expected arguments of Accelerator, or keys of a file that `accelerate config` writes. Received: "
                f"accelerate.{name}.{did_you_mean(name, known)}"
            )


def _asks(value: object) -> bool:
    """Whether a value of a file or of the environment asks for something."""
    return value is not None and str(value).lower() not in _NEUTRAL if not isinstance(value, bool) else value


def _decided(received: str, name: str, own: Mapping[str, object]) -> ValueError:
    mend = _OF_THE_LIBRARY[name]
    key = next((key for key in own if f"Set {key}" in mend), "stack")
    return ValueError(f"Expected the library to decide this. Received: {received} and {key}={own[key]!r}. {mend}")


def _mixed_precision(section: Mapping[str, object], environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return who asks for a mixed precision, and which; `accelerate launch` says `no` by default."""
    given = {
        "accelerate.mixed_precision": section.get("mixed_precision"),
        "ACCELERATE_MIXED_PRECISION": environment.get("ACCELERATE_MIXED_PRECISION"),
    }
    asked = [(name, str(value).lower()) for name, value in given.items() if _asks(value)]
    for name, value in asked:
        if value not in ("fp16", "bf16", "fp8"):
            raise ValueError(f"Expected {name} to be 'no', 'fp16', 'bf16' or 'fp8'. Received: {value!r}.")
    if len({value for _, value in asked}) > 1:
        raise ValueError(
            f"Expected one precision. Received: {' and '.join(f'{name}={value!r}' for name, value in asked)}. Leave one of them out."
        )
    return asked[0] if asked else None


def check_launch(settings: AccelerateSettings, environment: Mapping[str, str], *, world_size: int) -> None:
    """Refuse a start with another number of processes than was asked for; nothing has joined a group yet.

    `accelerate launch --cpu --num_processes 2` starts one process without an error. It tells it where to meet the others, which is
    all there is to know it by.
    """
    asked = settings.num_processes
    if asked is not None and asked not in (0, world_size):
        raise ValueError(
            f"Expected as many processes as accelerate.num_processes={asked}. Received: WORLD_SIZE={world_size}. Start with "
            f"torchrun --nproc-per-node {asked}, or leave num_processes out."
        )
    meeting = "ACCELERATE_MIXED_PRECISION" in environment and {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys()
    mpi = next((name for name in _MPI_SIZES if environment.get(name, "1") not in ("", "1")), None)
    if world_size == 1 and "RANK" not in environment and (meeting or mpi):
        received = (
            f"{mpi}={environment[mpi]}" if mpi else f"MASTER_PORT={environment['MASTER_PORT']} of `accelerate launch`"
        )
        raise ValueError(
            f"Expected the processes that were asked for. Received: {received}, and no RANK: a launcher that starts one process, or does "
            "not say which one of several this is, as `accelerate launch` does on the CPU. Start with torchrun --nproc-per-node N; for "
            "one process, unset MASTER_ADDR and MASTER_PORT."
        )
