"""Estimated bytes beside those that a model really keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch import distributed as dist

from danling.cli.estimate import OPTIMIZER_STATES, Model, bytes_per_rank
from danling.cli.main import main
from danling.cli.output import as_bytes

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rmsprop-momentum": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model whose first dimensions do not divide by two."""
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5)).to(dtype)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def local_bytes(tensors: Any) -> int:
    """Return the bytes of the elements that this rank holds."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local)


def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Train one step and add up what is there."""
    model(torch.randn(4, 7, dtype=next(model.parameters()).dtype)).float().sum().backward()
    optimizer.step()
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    gradients = local_bytes(parameter.grad for parameter in model.parameters())
    return {
        "parameters": local_bytes(model.parameters()),
        "gradients": gradients,
        "optimizer": local_bytes(states),
    }


def measure_sharded() -> dict[str, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return measure(model, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("world_size", [2, 3])
def test_fullest_rank_of_a_sharded_model_keeps_the_estimate(world_size: int) -> None:
    ranks = run_processes(measure_sharded, world_size=world_size, init_process_group=True)
    estimated = bytes_per_rank(Model.from_shapes(shapes_of(build())), {"shard": world_size})
    for part in ("parameters", "gradients", "optimizer"):
        assert estimated[part] == max(measured[part] for measured in ranks)
        assert min(measured[part] for measured in ranks) < estimated[part]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_keeps_its_estimate(name: str) -> None:
    model = build()
    measured = measure(model, OPTIMIZERS[name](model.parameters()))
    estimated = bytes_per_rank(Model.from_shapes(shapes_of(model)), {}, optimizer=name)
    assert {part: estimated[part] for part in measured} == measured
    assert set(OPTIMIZERS) == OPTIMIZER_STATES.keys() - {"none"}


def test_the_figures_of_the_paper() -> None:
    # ZeRO, arXiv:1910.02054, figure 1: 7.5 billion parameters on 64 ranks, Adam in mixed precision with a master copy.
    totals = [
        bytes_per_rank(Model(7.5e9), {"shard": 64}, stage=stage, precision="bf16", master=True)[
            "total"
        ]
        / 1e9
        for stage in range(4)
    ]
    assert totals == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)


def test_axes_divide_their_parameters() -> None:
    model = Model(dense=1e6, experts=8e6)
    layout = {
        "replicate": 2,
        "context": 2,
        "pipeline": 2,
        "tensor": 5,
        "expert": 4,
        "expert_tensor": 2,
        "shard": 10,
    }
    parts = bytes_per_rank(model, layout, optimizer="sgd", ema=True)
    assert parts["parameters"] == parts["ema"] == 4 * (1e6 / (2 * 5 * 10) + 8e6 / (2 * 4 * 2 * 10))
    halves = bytes_per_rank(model, layout, optimizer="sgd", ema=True, precision="bf16")
    assert halves["ema"] == parts["ema"] == 2 * halves["parameters"]


@pytest.mark.parametrize("words", ["--params many", "--params 1 --shard 0", "--params 1 --stage 4"])
def test_impossible_estimate_is_refused(words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", *words.split()])


def test_the_command_takes_counts_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--params", "7B", "--shard", "8", "--ema", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["world_size"] == 8 and facts["bytes_per_rank"]["total"] == 7e9 * (4 + 4 + 8 + 4) / 8
    )
    torch.save(build().state_dict(), "weights.pth")
    assert main(["estimate", "weights.pth", "--shard", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = bytes_per_rank(Model.from_shapes(shapes_of(build())), {"shard": 2})
    assert facts["bytes_per_rank"] == expected
    assert main(["estimate", "weights.pth"]) == 0 and "gradients" in capsys.readouterr().out
    assert main(["estimate", "weights.pth", "--params", "3"]) == 2


def test_sizes_have_three_digits_at_most() -> None:
    sizes = {
        999: "999 B",
        1000: "1 kB",
        50_330: "50.3 kB",
        999_499: "999 kB",
        999_700: "1 MB",
        16.6e9: "16.6 GB",
    }
    assert {size: as_bytes(size) for size in sizes} == sizes
