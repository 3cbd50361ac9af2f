"""Keys that the installed DeepSpeed does not know are named by their path, and those it knows pass."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes import run_processes
from support.stacks import needs_deepspeed

from danling.deepspeed.engine_config import check_keys

BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}

WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"foo": 1}, ["deepspeed.foo", "ignore"]),
    ({"zero_optimisation": {"stage": 1}}, ["deepspeed.zero_optimisation", "'zero_optimization'"]),
    ({"zero_optimization": {"stagee": 2}}, ["deepspeed.zero_optimization.stagee=2"]),
    ({"zero_optimization": {"stage": 7}}, ["deepspeed.zero_optimization.stage=7"]),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"devicee": "cpu"}}},
        ["deepspeed.zero_optimization.offload_optimizer.devicee"],
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        ["stage=2", "Partial offloading"],
    ),
    ({"bf16": {"enabledd": True}}, ["deepspeed.bf16.enabledd"]),
    ({"optimizer": {"type": "AdamW", "paramz": {}}}, ["deepspeed.optimizer.paramz", "'params'"]),
    ({"scheduler": {"typ": "WarmupLR"}}, ["deepspeed.scheduler.typ", "'type'"]),
    (
        {"data_types": {"grad_acum_dtype": "fp32"}},
        ["deepspeed.data_types.grad_acum_dtype", "'grad_accum_dtype'"],
    ),
    ({"tensorboard": {"enabld": True}}, ["deepspeed.tensorboard.enabld"]),
    ({"steps_per_print": 10, "wall_clock_breakdwn": True}, ["'wall_clock_breakdown'"]),
]

RIGHT: list[dict[str, Any]] = [
    {},
    {
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "offload_param": {"device": "cpu", "pin_memory": False},
        }
    },
    {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "torch_adam": True, "betas": [0.9, 0.95]},
        }
    },
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}},
    {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False}},
    {"flops_profiler": {"enabled": False, "profile_step": 2}, "comms_logger": {"enabled": False}},
    {"aio": {"block_size": 1048576}, "checkpoint": {"tag_validation": "Warn"}, "dump_state": False},
    {
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
    },
]


def messages() -> list[str]:
    import torch

    from danling.deepspeed.engine import import_deepspeed

    import_deepspeed(torch.device("cpu"))
    found = []
    for given, _ in WRONG:
        try:
            check_keys(given, {**BASE, **given})
            found.append("passed")
        except ValueError as error:
            found.append(str(error))
    for given in RIGHT:
        check_keys(given, {**BASE, **given})
    return found


@needs_deepspeed
@pytest.mark.timeout(120)
def test_unknown_keys_are_named_by_their_path_and_known_ones_pass() -> None:
    said = run_processes(messages, world_size=1, timeout=100)[0]
    for (given, words), message in zip(WRONG, said, strict=True):
        assert message.startswith("Expected"), (given, message)
        assert all(word in message for word in words), (given, message)
