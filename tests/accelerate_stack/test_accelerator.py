"""An accelerator of this process: where it must stand, and that it is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.accelerate.accelerator import (
    check_backend,
    check_place,
    open_accelerator,
    release_accelerator,
)
from danling.accelerate.settings import AccelerateSettings
from danling.distributed import LaunchEnvironment

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
    facts = {"num_processes": 1, "process_index": 0, "distributed_type": "DistributedType.NO", "mixed_precision": "no"}
    return kind(**{**facts, "device": torch.device("cuda"), **changes})


def test_what_it_may_be() -> None:
    check_place(standing(), NOTHING, ALONE)
    check_place(standing(mixed_precision="fp8"), AccelerateSettings(fp8=True), ALONE)
    with pytest.raises(ValueError, match="distributed_type=FSDP"):
        check_place(standing(distributed_type="DistributedType.FSDP"), NOTHING, ALONE)
    with pytest.raises(ValueError, match="train in fp8. Received: cuda, .*mixed_precision='fp16'"):
        check_place(standing(mixed_precision="fp16"), AccelerateSettings(fp8=True), ALONE)


def test_a_group_without_collectives_for_the_device() -> None:
    check_backend("cpu", "cpu:gloo")
    check_backend("cuda", "cpu:gloo,cuda:nccl")
    with pytest.raises(ValueError, match="device='xpu', backend='cpu:gloo'. Set backend='cpu:gloo,xpu:xccl'"):
        check_backend("xpu", "cpu:gloo")
