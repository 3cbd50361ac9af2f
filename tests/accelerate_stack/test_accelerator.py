"""Accelerate's settings, the accelerator of a process, and what it makes of model and optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from danling.accelerate.accelerator import (
    AcceleratePreparation,
    AccelerateReduction,
    AccelerateSettings,
    check_launch,
    check_place,
    open_accelerator,
    read_settings,
    release_accelerator,
)
from danling.distributed import LaunchEnvironment, LocalDomain
from danling.training import NonFiniteError

accelerate = pytest.importorskip("accelerate")

ALONE = LaunchEnvironment()
NOTHING = AccelerateSettings()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    assert not accelerate.state.is_initialized(), "a test left an accelerator behind"
    assert accelerate.state.GradientState._shared_state == {}


def test_it_divides_nothing_and_moves_no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerator = open_accelerator(NOTHING, ALONE, {})
    assert accelerator.gradient_accumulation_steps == 1
    assert not accelerator.step_scheduler_with_optimizer
    # Autocast and the scaler are the library's.
    assert accelerator.mixed_precision == "no"
    assert accelerator.scaler is None
    release_accelerator()


def test_one_process_under_a_launcher_makes_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    accelerator = open_accelerator(NOTHING, ALONE, {})
    assert (accelerator.num_processes, accelerator.device) == (1, torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    release_accelerator()


def test_two_users_share_the_state_and_the_last_one_resets_it() -> None:
    first, second = (open_accelerator(NOTHING, ALONE, {}) for _ in range(2))
    release_accelerator()
    assert second.num_processes == first.num_processes == 1
    release_accelerator()
    with pytest.raises(AttributeError, match="_reset_state"):
        second.num_processes  # noqa: B018


def test_an_accelerator_of_the_programs_own_is_refused() -> None:
    accelerate.Accelerator(cpu=True)
    try:
        with pytest.raises(ValueError, match="one that was made before"):
            open_accelerator(NOTHING, ALONE, {})
    finally:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()


def standing(**changes: Any) -> Any:
    kind = SimpleNamespace
    facts = {
        "num_processes": 1,
        "process_index": 0,
        "distributed_type": "DistributedType.NO",
        "mixed_precision": "no",
    }
    return kind(**{**facts, "device": torch.device("cuda"), **changes})


def test_accelerator_with_another_strategy_or_precision_is_refused() -> None:
    check_place(standing(), NOTHING, ALONE)
    check_place(standing(mixed_precision="fp8"), AccelerateSettings(fp8=True), ALONE)
    with pytest.raises(ValueError, match="distributed_type=FSDP"):
        check_place(standing(distributed_type="DistributedType.FSDP"), NOTHING, ALONE)
    with pytest.raises(ValueError, match="train in fp8. Received: cuda, .*mixed_precision='fp16'"):
        check_place(standing(mixed_precision="fp16"), AccelerateSettings(fp8=True), ALONE)


@pytest.fixture
def accelerator() -> Iterator[Any]:
    yield open_accelerator(NOTHING, ALONE, {})
    release_accelerator()


def reduction(
    accelerator: Any, model: nn.Module, optimizer: Any, scaler: Any = None
) -> AccelerateReduction:
    preparation = AcceleratePreparation(LocalDomain(), accelerator=accelerator)
    preparation.bind(optimizer)
    wrapped = preparation.wrap(model, {})
    runner: Any = SimpleNamespace(
        optimizer=optimizer, precision=SimpleNamespace(scaler=scaler), accelerator=accelerator
    )
    runner.named_parameters, runner.model, runner.preparation = (
        model.named_parameters,
        wrapped,
        preparation,
    )
    runner.data_domain, runner.state = (
        LocalDomain(),
        SimpleNamespace(train=SimpleNamespace(global_step=0)),
    )
    return AccelerateReduction(runner, averages="criterion")


def test_until_it_is_bound_the_model_is_as_it_is(accelerator: Any) -> None:
    preparation = AcceleratePreparation(LocalDomain(), accelerator=accelerator)
    model = nn.Linear(2, 2)
    assert preparation.wrap(model, {}) is model
    assert accelerator._models == []
    with pytest.raises(ValueError, match=r"Call super\(\).bind_optimizer\(\) in it"):
        preparation.stepped(torch.optim.SGD(model.parameters(), lr=1.0))
    preparation.bind(None)
    assert preparation.wrap(model, {}) is model
    assert accelerator._models == [model]


def test_the_optimizer_stays_the_users(accelerator: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    group = optimizer.param_groups[0]
    preparation = AcceleratePreparation(LocalDomain(), accelerator=accelerator)
    preparation.bind(optimizer)
    assert (
        preparation.unwrap(preparation.wrap(model, {})) is model is accelerator.unwrap_model(model)
    )
    stepped = preparation.stepped(optimizer)
    assert isinstance(stepped, accelerate.optimizer.AcceleratedOptimizer)
    assert stepped.optimizer is optimizer and optimizer.param_groups[0] is group
    assert preparation.stepped(optimizer) is stepped
    another = torch.optim.SGD(model.parameters(), lr=1.0)
    assert preparation.stepped(another).optimizer is another


def test_step_is_made_even_if_accelerate_counts_otherwise(accelerator: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    weight = model.weight.detach().clone()
    through = reduction(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    through.begin()
    through.backward(model(torch.ones(1, 1)).sum(), last=True)
    accelerator.sync_gradients = False
    through.apply()
    assert torch.equal(model.weight, weight - 1.0)
    through.zero()
    assert model.weight.grad is None


def test_step_left_out_by_accelerate_is_an_error(accelerator: Any) -> None:
    model = nn.Linear(1, 1)
    through = reduction(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0))
    through.stepped._is_overflow = True
    with pytest.raises(NonFiniteError, match="update 1, which was found finite"):
        through.apply()


def test_one_scaler_the_librarys(accelerator: Any) -> None:
    """A step through the accelerated optimizer is unscaled once; a gradient that is not finite halves the scale."""
    model = nn.Linear(1, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    through = reduction(accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0), scaler)
    for value, moved in ((1.0, 1.0), (float("inf"), 0.0)):
        before = model.weight.detach().clone()
        through.backward(scaler.scale(value * model(torch.ones(1, 1)).sum()), last=True)
        if through.norm(through.unscale(1.0, 1.0)).isfinite():
            through.apply()
        scaler.update()
        through.zero()
        assert torch.equal(model.weight, before - moved)
    assert scaler.get_scale() == 4.0


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
    return read_settings(section or {}, environment or {}, **{"precision": None, **own})


def test_nothing_is_asked_for() -> None:
    assert read() == AccelerateSettings()
    # What `accelerate launch` sets where nobody asks for anything.
    said = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_USE_CPU": "False",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
    }
    assert read({}, said, precision="bf16") == AccelerateSettings(precision="bf16")


def test_a_file_of_accelerate_config() -> None:
    assert read(WRITTEN) == AccelerateSettings(precision="bf16", num_processes=2)
    assert read({**WRITTEN, "use_cpu": True, "num_processes": -1}).cpu
    assert (
        read(WRITTEN, {"ACCELERATE_MIXED_PRECISION": "bf16"}, precision="bf16").precision == "bf16"
    )


def test_fp8_is_left_to_accelerate() -> None:
    assert read({"mixed_precision": "fp8"}) == AccelerateSettings(fp8=True)
    assert read({}, {"ACCELERATE_MIXED_PRECISION": "fp8"}).fp8


@pytest.mark.parametrize(
    ("section", "environment", "both"),
    [
        (
            {"gradient_accumulation_steps": 2},
            {},
            ["accelerate.gradient_accumulation_steps=2", "Set accum_steps"],
        ),
        (
            {},
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"},
            ["ACCUMULATION_STEPS='2'", "Set accum_steps"],
        ),
        (
            {"step_scheduler_with_optimizer": True},
            {},
            ["step_scheduler_with_optimizer=True", "scheduler.interval"],
        ),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            {},
            ["dynamo_config", "compile.backend"],
        ),
        (
            {},
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
            ["ACCELERATE_DYNAMO_BACKEND", "compile.backend"],
        ),
        ({"deepspeed_config": {"zero_stage": 2}}, {}, ["deepspeed_config", "stack='deepspeed'"]),
        (
            {},
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            ["ACCELERATE_USE_DEEPSPEED", "stack='deepspeed'"],
        ),
        (
            {},
            {"ACCELERATE_USE_MEGATRON_LM": "true"},
            ["ACCELERATE_USE_MEGATRON_LM", "stack='deepspeed'"],
        ),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, ["ACCELERATE_USE_FSDP", "parallel.axes.shard"]),
        ({"fsdp_config": {"fsdp_version": 2}}, {}, ["fsdp_config", "parallel.axes.shard"]),
        (
            {},
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
            ["PARALLELISM_CONFIG", "parallel.axes"],
        ),
        (
            {"distributed_type": "DEEPSPEED"},
            {},
            ["accelerate.distributed_type='DEEPSPEED'", "stack='deepspeed'"],
        ),
        (
            {"distributed_type": "FSDP"},
            {},
            ["accelerate.distributed_type='FSDP'", "parallel.axes.shard"],
        ),
        ({"distributed_type": "XLA"}, {}, ["accelerate.distributed_type='XLA'", "stack='ddp'"]),
        ({"kwargs_handlers": ["DDP"]}, {}, ["kwargs_handlers", "accelerate_kwargs"]),
        ({"mixed_precison": "bf16"}, {}, ["accelerate.mixed_precison", "'mixed_precision'"]),
        ({"mixed_precision": "int4"}, {}, ["accelerate.mixed_precision", "'int4'"]),
    ],
)
def test_setting_decided_by_the_library_is_refused_with_both_names(
    section: dict[str, Any], environment: dict[str, str], both: list[str]
) -> None:
    with pytest.raises(ValueError, match="Received: ") as error:
        read(section, environment)
    assert all(name in str(error.value) for name in both)


@pytest.mark.parametrize("said", ["fp16", "fp8"])
def test_contradictory_precisions_are_refused(said: str) -> None:
    with pytest.raises(
        ValueError, match=f"precision='bf16' and ACCELERATE_MIXED_PRECISION='{said}'"
    ):
        read({}, {"ACCELERATE_MIXED_PRECISION": said}, precision="bf16")
    with pytest.raises(
        ValueError,
        match=f"accelerate.mixed_precision='bf16' and ACCELERATE_MIXED_PRECISION='{said}'",
    ):
        read({"mixed_precision": "bf16"}, {"ACCELERATE_MIXED_PRECISION": said})


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        ({"gradient_accumulation_steps": 2}, "Set accum_steps"),
        ({"mixed_precision": "bf16"}, "accelerate.mixed_precision in the configuration"),
        ({"fsdp_plugin": object()}, "parallel.axes.shard"),
        ({"deepspeed_plugin": object()}, "stack='deepspeed'"),
        (
            {"kwargs_handlers": [accelerate.utils.GradScalerKwargs()]},
            "GradScalerKwargs .* Set precision='fp16'",
        ),
        ({"kwargs_handlers": [accelerate.utils.InitProcessGroupKwargs()]}, "Set backend"),
    ],
)
def test_arguments_of_the_library_are_refused(arguments: dict[str, Any], mend: str) -> None:
    handlers = arguments.get("kwargs_handlers", [])
    with pytest.raises(ValueError, match=mend):
        open_accelerator(
            NOTHING,
            ALONE,
            {
                **arguments,
                "kwargs_handlers": [accelerate.DistributedDataParallelKwargs(), *handlers],
            },
        )


def test_handlers_of_the_wrapper_are_taken() -> None:
    handler = accelerate.DistributedDataParallelKwargs()
    assert open_accelerator(NOTHING, ALONE, {"kwargs_handlers": [handler]}).ddp_handler is handler
    release_accelerator()


def test_another_number_of_processes_than_the_file_says() -> None:
    check_launch(AccelerateSettings(num_processes=2), {}, world_size=2)
    with pytest.raises(
        ValueError,
        match=r"num_processes=2\. Received: WORLD_SIZE=1\. Start with torchrun --nproc-per-node 2",
    ):
        check_launch(AccelerateSettings(num_processes=2), {}, world_size=1)


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", **MEETING}


def test_launcher_of_one_of_several_processes_is_refused() -> None:
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
def test_right_starts_are_accepted(environment: dict[str, str], world_size: int) -> None:
    check_launch(NOTHING, environment, world_size=world_size)
