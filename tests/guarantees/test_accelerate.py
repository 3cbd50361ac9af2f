"""Training through Accelerate: the gradient of the whole, the run of `ddp` to the bit, and starts that would train something else."""

from __future__ import annotations

import sys
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

WINDOWS = ([8, 3], [5, 1])
"""Sizes of the micro-batches of each rank's window."""
SAMPLES = 17


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return x, 3 * x.sum(1, keepdim=True) + torch.randn(SAMPLES, 1, dtype=torch.float64, generator=generator)


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    x, y = points()
    sizes = [size for window in WINDOWS for size in window]
    parts = list(zip(x.split(sizes), y.split(sizes)))
    return parts[2 * rank : 2 * rank + 2]


def by_hand(*, weighed: bool) -> dict[str, Tensor]:
    """Accumulate two batches as Accelerate's documentation shows, or with the right weights in it. The optimizer is never stepped."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    bare = build()
    model, _ = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    for x, y in batches_of(accelerator.process_index):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            # DistributedDataParallel takes the mean over the two ranks.
            accelerator.backward(loss * len(x) * 2 / SAMPLES if weighed else loss)
    gradients = {name: p.grad.clone() for name, p in bare.named_parameters() if p.grad is not None}
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return gradients


class Recording(dl.Runner):
    """Keeps the gradient of its update."""

    not_saved = ("gradients",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = build()
        self.criterion = nn.MSELoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dataloaders = {"train": batches_of(self.rank)}
        self.gradients: dict[str, Tensor] = {}

    def optimizer_step(self) -> None:
        """Look at the gradients, then step."""
        self.gradients = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        super().optimizer_step()


def table(root: str) -> dict[str, dict[str, Tensor]]:
    found = {"documented": by_hand(weighed=False), "accumulation left at 2": by_hand(weighed=True)}
    config = {"stack": "accelerate", "steps": 1, "seed": 0, "accum_steps": 2, "workspace_root": root, "log": False}
    with Recording(config) as runner:
        runner.train()
        return {**found, "the runner": runner.gradients}


def test_the_gradient_of_a_window_is_that_of_the_whole(tmp_path: Path) -> None:
    model = build()
    x, y = points()
    nn.functional.mse_loss(model(x), y).backward()
    errors: dict[str, list[float]] = {}
    for rank in run_processes(table, str(tmp_path), world_size=2):
        for way, gradients in rank.items():
            for name, parameter in model.named_parameters():
                error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
                errors.setdefault(way, []).append(error.item())
    assert max(errors["the runner"]) < 1e-12
    assert errors["accumulation left at 2"] == pytest.approx([0.5] * 8, abs=1e-12)
    assert min(errors["documented"]) > 0.05


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
        """Freeze the first layer for the second epoch, which wraps the model anew."""
        if self.config.get("freezes", False) and self.train_state.epoch == 1:
            self.unwrapped_model[0].requires_grad_(False)
        return super().train_epoch(split)

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        """Scale the prediction by what the criterion has learned."""
        return super().compute_loss(pred * getattr(self.criterion, "scale", 1.0), target)


def train(config: dict[str, Any]) -> dict[str, Any]:
    with Toy(config) as runner:
        runner.train()
        assert type(runner).stack == config["stack"]
        return {"trace": runner.trace, "ids": runner.ids, "results": dict(runner.results), "state": whole_state(runner)}


RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bf16"},
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


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_is_that_of_ddp_to_the_bit(world_size: int, tmp_path: Path) -> None:
    """Ragged windows, dropout, averages, clipping, a schedule; twelve runners in the life of one process."""
    ranks = run_processes(each_on_both, str(tmp_path), world_size=world_size, timeout=100)
    assert ranks == [{name: [] for name in RUNS}] * world_size


def rates_and_samples(root: str, stack: str) -> tuple[list[float], list[int]]:
    sizes = {"global_batch_size": 6, "drop_last": False}
    run = train(settings(root, stack, epochs=1, accum_steps=1, dataloader=sizes))
    return [rate for _, _, rate in run["trace"]], run["ids"]


def test_every_sample_once_and_one_schedule_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    """26 samples do not divide over the ranks; a loader or a schedule that Accelerate prepared would repeat and run ahead."""
    expected, order = rates_and_samples(str(tmp_path / "ddp"), "ddp")
    for world_size in (1, 2):
        ranks = run_processes(rates_and_samples, str(tmp_path / f"{world_size}"), "accelerate", world_size=world_size)
        assert all(rates == expected for rates, _ in ranks)
        assert sorted(sample for _, ids in ranks for sample in ids) == sorted(order) == list(range(26))


class Plain(dl.Runner):
    """A runner that is not trained."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 2)


def construct(config: dict[str, Any]) -> None:
    with Plain(config):
        pass


class Unusual(Plain):
    """Has arguments for the wrapper."""

    def ddp_kwargs(self) -> dict[str, Any]:
        """Return them."""
        return {**super().ddp_kwargs(), "find_unused_parameters": True}

    def accelerate_kwargs(self) -> dict[str, Any]:
        """Hand over those that Accelerate's users keep in a handler."""
        from accelerate import DistributedDataParallelKwargs

        return {"kwargs_handlers": [DistributedDataParallelKwargs(bucket_cap_mb=7)]}


def arguments_of_the_wrapper(config: dict[str, Any]) -> tuple[bool, int, bool]:
    with Unusual(config) as runner:
        wrapper: Any = runner.model
        bare = runner.accelerator.unwrap_model(wrapper) is runner.unwrapped_model
        return wrapper.find_unused_parameters, wrapper.bucket_bytes_cap, bare


def test_the_wrapper_gets_the_arguments_of_both(tmp_path: Path) -> None:
    config = {"stack": "accelerate", "dir": str(tmp_path / "run")}
    assert run_processes(arguments_of_the_wrapper, config, world_size=2) == [(True, 7 * 2**20, True)] * 2


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


def make_another_first(config: dict[str, Any]) -> None:
    from accelerate import PartialState

    PartialState()  # on the CPU it takes each rank for one alone
    construct(config)


def test_a_world_that_accelerate_does_not_see_is_refused(tmp_path: Path) -> None:
    config = {"stack": "accelerate", "dir": str(tmp_path / "run")}
    for outcome in run_outcomes(make_another_first, config, world_size=2):
        assert "num_processes=1" in str(outcome.error) and "WORLD_SIZE=2" in str(outcome.error)


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
    with Job([*launcher, "script.py", *arguments], ranks=2) as job:
        return job.wait()


def test_accelerate_launch_that_starts_one_process_for_two_is_refused() -> None:
    exit_code, output = launched("--num_processes", "2")
    assert exit_code != 0
    assert "torchrun --nproc-per-node N" in output
    assert "precision:" not in output


@pytest.mark.slow
def test_accelerate_launch_tells_the_precision() -> None:
    exit_code, output = launched("--num_processes", "1", "--mixed_precision", "bf16")
    assert exit_code == 0, output
    assert "precision: bf16 processes: 1" in output
    exit_code, output = launched("--num_processes", "1", "--mixed_precision", "bf16", arguments=("--precision", "fp16"))
    assert exit_code != 0
    assert "precision='fp16' and ACCELERATE_MIXED_PRECISION='bf16'" in output


class Meddling(Toy):
    """Makes an accelerator of its own in the third update."""

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        """Make it, then train."""
        if self.train_state.global_step == 2:
            from accelerate import Accelerator

            Accelerator(gradient_accumulation_steps=3)
        return super().train_step(data)


def test_leftover_accumulation_ends_the_run(tmp_path: Path) -> None:
    with Meddling(settings(str(tmp_path / "run"), "accelerate")) as runner:
        with pytest.raises(ValueError, match="gradient_accumulation_steps=3"):
            runner.train()
        assert runner.train_state.global_step <= 3


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


def test_without_the_package_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="Expected the package accelerate for stack='accelerate'"):
        construct({"stack": "accelerate", "dir": str(tmp_path / "run")})
    assert not (tmp_path / "run").exists()


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
