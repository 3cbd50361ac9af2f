"""What Accelerate is told, what it must not be told, and how a wrong start is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from danling.accelerate.settings import AccelerateSettings, check_arguments, check_launch, read_settings

accelerate = pytest.importorskip("accelerate")

WRITTEN = {
    # As `accelerate config` writes it for one machine with two processes.
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "MULTI_GPU",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}


def read(
    section: dict[str, Any] | None = None, environment: dict[str, str] | None = None, **own: Any
) -> AccelerateSettings:
    return read_settings(section or {}, environment or {}, **{"precision": None, "accum_steps": 1, **own})


def test_nothing_is_asked_for() -> None:
    assert read() == AccelerateSettings()
    # What `accelerate launch` sets where nobody asks for anything.
    said = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    assert read({}, said, precision="bf16") == AccelerateSettings(precision="bf16")


def test_a_file_of_accelerate_config() -> None:
    assert read(WRITTEN) == AccelerateSettings(precision="bf16", num_processes=2)
    assert read({**WRITTEN, "use_cpu": True, "num_processes": -1}).cpu
    assert read(WRITTEN, {"ACCELERATE_MIXED_PRECISION": "bf16"}, precision="bf16").precision == "bf16"


def test_fp8_is_left_to_accelerate() -> None:
    assert read({"mixed_precision": "fp8"}) == AccelerateSettings(fp8=True)
    assert read({}, {"ACCELERATE_MIXED_PRECISION": "fp8"}).fp8


@pytest.mark.parametrize(
    ("section", "environment", "both"),
    [
        ({"gradient_accumulation_steps": 2}, {}, ["accelerate.gradient_accumulation_steps=2", "accum_steps=4"]),
        ({}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, ["ACCUMULATION_STEPS='2'", "accum_steps=4"]),
        ({"step_scheduler_with_optimizer": True}, {}, ["step_scheduler_with_optimizer=True", "scheduler.interval"]),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {}, ["dynamo_config", "compile.backend"]),
        ({}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, ["ACCELERATE_DYNAMO_BACKEND", "compile.backend"]),
        ({"deepspeed_config": {"zero_stage": 2}}, {}, ["deepspeed_config", "stack='deepspeed'"]),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, ["ACCELERATE_USE_DEEPSPEED", "stack='deepspeed'"]),
        ({}, {"ACCELERATE_USE_MEGATRON_LM": "true"}, ["ACCELERATE_USE_MEGATRON_LM", "stack='deepspeed'"]),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, ["ACCELERATE_USE_FSDP", "parallel.axes.shard"]),
        ({"fsdp_config": {"fsdp_version": 2}}, {}, ["fsdp_config", "parallel.axes.shard"]),
        ({}, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, ["PARALLELISM_CONFIG", "parallel.axes"]),
        ({"distributed_type": "DEEPSPEED"}, {}, ["accelerate.distributed_type='DEEPSPEED'", "stack='deepspeed'"]),
        ({"distributed_type": "FSDP"}, {}, ["accelerate.distributed_type='FSDP'", "parallel.axes.shard"]),
        ({"distributed_type": "XLA"}, {}, ["accelerate.distributed_type='XLA'", "stack='ddp'"]),
        ({"kwargs_handlers": ["DDP"]}, {}, ["kwargs_handlers", "accelerate_kwargs"]),
        ({"mixed_precison": "bf16"}, {}, ["accelerate.mixed_precison", "'mixed_precision'"]),
        ({"mixed_precision": "int4"}, {}, ["accelerate.mixed_precision", "'int4'"]),
    ],
)
def test_what_the_library_decides_is_refused_with_both_names(
    section: dict[str, Any], environment: dict[str, str], both: list[str]
) -> None:
    with pytest.raises(ValueError, match="Received: ") as error:
        read(section, environment, accum_steps=4)
    assert all(name in str(error.value) for name in both)


@pytest.mark.parametrize("said", ["fp16", "fp8"])
def test_precisions_that_contradict_each_other(said: str) -> None:
    with pytest.raises(ValueError, match=f"precision='bf16' and ACCELERATE_MIXED_PRECISION='{said}'"):
        read({}, {"ACCELERATE_MIXED_PRECISION": said}, precision="bf16")
    with pytest.raises(ValueError, match=f"accelerate.mixed_precision='bf16' and ACCELERATE_MIXED_PRECISION='{said}'"):
        read({"mixed_precision": "bf16"}, {"ACCELERATE_MIXED_PRECISION": said})


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        ({"gradient_accumulation_steps": 2}, "Set accum_steps"),
        ({"fsdp_plugin": object()}, "parallel.axes.shard"),
        ({"deepspeed_plugin": object()}, "stack='deepspeed'"),
        ({"cpu": True}, "accelerate.cpu in the configuration"),
        ({"mixed_precision": "bf16"}, "accelerate.mixed_precision in the configuration"),
        ({"kwargs_handlers": [accelerate.utils.GradScalerKwargs()]}, "GradScalerKwargs .* Set precision='fp16'"),
        ({"kwargs_handlers": [accelerate.utils.InitProcessGroupKwargs()]}, "Set backend"),
    ],
)
def test_arguments_that_are_not_accelerates_to_take(arguments: dict[str, Any], mend: str) -> None:
    with pytest.raises(ValueError, match=mend):
        check_arguments(arguments)


def is_refused(check: Callable[[], None]) -> bool:
    """Whether a check raises the error that is for users."""
    try:
        check()
    except ValueError:
        return True
    return False


def test_arguments_that_are() -> None:
    assert not is_refused(lambda: check_arguments({}))
    handlers = [accelerate.DistributedDataParallelKwargs()]
    assert not is_refused(lambda: check_arguments({"kwargs_handlers": handlers}))
    assert is_refused(lambda: check_arguments({"kwargs_handlers": handlers, "gradient_accumulation_steps": 2}))


def test_another_number_of_processes_than_the_file_says() -> None:
    check_launch(AccelerateSettings(num_processes=2), {}, world_size=2)
    with pytest.raises(
        ValueError, match=r"num_processes=2\. Received: WORLD_SIZE=1\. Start with torchrun --nproc-per-node 2"
    ):
        check_launch(AccelerateSettings(num_processes=2), {}, world_size=1)


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", **MEETING}


def test_a_launcher_that_starts_one_of_several_processes() -> None:
    for environment in (LAUNCHED, {"OMPI_COMM_WORLD_SIZE": "2"}):
        with pytest.raises(ValueError, match="torchrun --nproc-per-node N"):
            check_launch(AccelerateSettings(), environment, world_size=1)


@pytest.mark.parametrize(
    ("environment", "world_size"),
    [
        ({}, 1),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, 1),  # accelerate launch --num_processes 1
        (MEETING, 1),  # of another program on this machine
        ({**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1"}, 1),
        ({**LAUNCHED, "RANK": "0", "WORLD_SIZE": "2"}, 2),
    ],
)
def test_starts_that_are_right(environment: dict[str, str], world_size: int) -> None:
    assert not is_refused(lambda: check_launch(AccelerateSettings(), environment, world_size=world_size))
