"""Training through Accelerate: the gradient of the whole, the run of `ddp` to the bit, and starts that would train something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import TracingRunner, differences, whole_settings, whole_state
from torch import Tensor, nn

import danling as dl

pytest.importorskip("accelerate")


def settings(root: str, stack: str, **changes: Any) -> dict[str, Any]:
    schedule = {"type": "cosine", "total_steps": 40, "warmup_steps": 4}
    more = {
        "stack": stack,
        "epochs": 2,
        "accum_steps": 3,
        "scheduler": schedule,
        "max_grad_norm": 1.0,
    }
    return whole_settings("unused", **{**more, "dir": root, "log": False, **changes})


class Toy(TracingRunner, dl.Runner):
    def __init__(self, config: Mapping[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        if self.config.get("scaled", False):
            self.criterion.scale = nn.Parameter(torch.ones(()))

    def train_epoch(self, split: str = "train") -> dict[str, float]:
        if self.config.get("freezes", False) and self.train_state.epoch == 1:
            self.unwrapped_model[0].requires_grad_(False)
        return super().train_epoch(split)

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        return super().compute_loss(pred * getattr(self.criterion, "scale", 1.0), target)


def train(config: dict[str, Any]) -> dict[str, Any]:
    with Toy(config) as runner:
        runner.train()
        assert type(runner).stack == config["stack"]
        return {
            "trace": runner.trace,
            "ids": runner.ids,
            "results": dict(runner.results),
            "state": whole_state(runner),
        }


RUNS: dict[str, dict[str, Any]] = {
    "float16": {"precision": "fp16"},
    "a criterion with parameters": {"scaled": True},
    "a layer that freezes": {"freezes": True},
    "as much as fits": {
        "accum_steps": 1,
        "dataloader": {"global_batch_size": 7, "micro_batch_size": "auto"},
    },
}


def each_on_both(root: str) -> dict[str, list[str]]:
    """Train on both stacks, one runner after the other in one process."""
    return {
        name: differences(
            *(
                train(settings(f"{root}/{index}-{stack}", stack, **run))
                for stack in ("ddp", "accelerate")
            )
        )
        for index, (name, run) in enumerate(RUNS.items())
    }


def test_run_equals_ddp_bitwise(tmp_path: Path) -> None:
    """Ragged windows, dropout, averages, clipping, a schedule; eight runners in the life of one process."""
    ranks = run_processes(each_on_both, str(tmp_path), world_size=2, timeout=100)
    assert ranks == [{name: [] for name in RUNS}] * 2


class Plain(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 2)


def construct(config: dict[str, Any]) -> None:
    with Plain(config):
        pass


def plugin_on_the_cpu() -> tuple[int, str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    return accelerator.num_processes, str(accelerator.distributed_type)


def test_plugin_without_communication_is_refused(tmp_path: Path) -> None:
    assert run_processes(plugin_on_the_cpu, world_size=2) == [(1, "DistributedType.NO")] * 2
    config = {"stack": "accelerate", "dir": str(tmp_path / "run")}
    environment = {"ACCELERATE_USE_FSDP": "true"}
    for outcome in run_outcomes(construct, config, world_size=2, environment=environment):
        assert "parallel.axes.shard" in str(outcome.error)
    assert not (tmp_path / "run").exists()


def test_the_class_may_be_subclassed_directly(tmp_path: Path) -> None:
    class Direct(dl.AccelerateRunner):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.model = nn.Linear(2, 2)

    with Direct({"dir": str(tmp_path / "run")}) as runner:
        assert runner.accelerator.num_processes == 1
    with pytest.raises(ValueError, match="Expected a configuration for the stack 'accelerate'"):
        Direct({"dir": str(tmp_path / "other"), "stack": "ddp"})
