"""Training through Accelerate: the gradient of the whole, the run of `ddp` to the bit, and starts that would train something else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job
from support.processes import run_outcomes, run_processes
from support.toys import TracingRunner, differences, whole_state
from support.warm import interpreter
from torch import Tensor, nn

import danling as dl

pytest.importorskip("accelerate")


def settings(root: str, stack: str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "stack": stack,
        "epochs": 2,
        "seed": 3,
        "accum_steps": 3,
        "ema": {"enabled": True, "decay": 0.9},
        "dataloader": {"batch_size": 2, "drop_last": False},
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine", "total_steps": 40, "warmup_steps": 4},
        "max_grad_norm": 1.0,
        "dir": root,
        "log": False,
    }
    return {**base, **changes}


class Toy(TracingRunner, dl.Runner):
    """The shared toy, on any stack."""

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
        return {"trace": runner.trace, "ids": runner.ids, "results": dict(runner.results), "state": whole_state(runner)}


RUNS: dict[str, dict[str, Any]] = {
    "float16": {"precision": "fp16"},
    "a criterion with parameters": {"scaled": True},
    "a layer that freezes": {"freezes": True},
    "as much as fits": {"accum_steps": 1, "dataloader": {"global_batch_size": 7, "micro_batch_size": "auto"}},
}


def each_on_both(root: str) -> dict[str, list[str]]:
    """Train on both stacks, one runner after the other in one process."""
    return {
        name: differences(
            *(train(settings(f"{root}/{index}-{stack}", stack, **run)) for stack in ("ddp", "accelerate"))
        )
        for index, (name, run) in enumerate(RUNS.items())
    }


def test_a_run_is_that_of_ddp_to_the_bit(tmp_path: Path) -> None:
    """Ragged windows, dropout, averages, clipping, a schedule; eight runners in the life of one process."""
    ranks = run_processes(each_on_both, str(tmp_path), world_size=2, timeout=100)
    assert ranks == [{name: [] for name in RUNS}] * 2


class Plain(dl.Runner):
    """A runner that is not trained."""

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


def test_a_plugin_that_would_train_each_rank_alone_is_refused(tmp_path: Path) -> None:
    assert run_processes(plugin_on_the_cpu, world_size=2) == [(1, "DistributedType.NO")] * 2
    config = {"stack": "accelerate", "dir": str(tmp_path / "run")}
    environment = {"ACCELERATE_USE_FSDP": "true"}
    for outcome in run_outcomes(construct, config, world_size=2, environment=environment):
        assert "parallel.axes.shard" in str(outcome.error)
    assert not (tmp_path / "run").exists()


SCRIPT = """
import torch
import danling as dl

class Toy(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.model = torch.nn.Linear(2, 2)

config = dl.RunnerConfig(stack="accelerate", dir="run")
config.parse()
with Toy(config) as runner:
    print("precision:", runner.config.precision, "processes:", runner.world_size)
"""


def launched(*options: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    Path("script.py").write_text(SCRIPT)
    launcher = [interpreter(), "-m", "accelerate.commands.launch", "--cpu", *options]
    with Job([*launcher, "script.py", *arguments]) as job:
        return job.wait()


@pytest.mark.slow
def test_accelerate_launch_that_starts_one_process_for_two_is_refused() -> None:
    exit_code, output = launched("--num_processes", "2")
    assert exit_code != 0
    assert "torchrun --nproc-per-node N" in output
    assert "precision:" not in output


def test_platform_accelerate_is_this_stack(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="use 'stack'"):
        config = dl.RunnerConfig({"platform": "accelerate", "dir": str(tmp_path / "run")})
    with Plain(config) as runner:
        assert isinstance(runner, dl.AccelerateRunner)


def test_the_class_may_be_subclassed_directly(tmp_path: Path) -> None:
    class Direct(dl.AccelerateRunner):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.model = nn.Linear(2, 2)

    with Direct({"dir": str(tmp_path / "run")}) as runner:
        assert runner.accelerator.num_processes == 1
    with pytest.raises(ValueError, match="Expected a configuration for the stack 'accelerate'"):
        Direct({"dir": str(tmp_path / "other"), "stack": "ddp"})


def test_what_the_configuration_keeps_of_accelerates_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The precision is the run's own from then on, so that a resume compares it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    file = tmp_path / "accelerate.yaml"
    file.write_text("mixed_precision: bf16\nuse_cpu: true\nnum_processes: 1\n")
    given = dl.RunnerConfig({"stack": "accelerate", "dir": str(tmp_path / "run"), "accelerate": str(file)})
    with Plain(given) as runner:
        assert runner.config.precision == "bf16"
        assert runner.precision.dtype is torch.bfloat16
    assert given.precision is None, "the caller's configuration is left alone"
