"""Whole weights on every stack: the same tensors to look at, and what rank 0 writes stays, through the next update too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed
from support.toys import Chain, settings
from torch import Tensor, nn

import danling as dl


def looked_at(root: str, stack: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    still = {"optim": {"type": "sgd", "lr": 0.0}, "checkpoint": {"load_only": True}}
    with Chain(settings(root, steps=1, **still, **stack)) as runner:

        def copies() -> dict[str, Tensor]:
            with runner.whole_weights():
                return {
                    name: p.detach().clone()
                    for name, p in runner.unwrapped_model.named_parameters()
                }

        before = copies()
        with runner.whole_weights(modify=True), torch.no_grad():
            for parameter in runner.unwrapped_model.parameters():
                parameter.mul_(2.0 if runner.is_main_process else 7.0)
        written = copies()
        runner.train()
        return {"before": before, "written": written, "trained": copies()}


STACKS = [
    pytest.param({}, id="ddp"),
    pytest.param({"stack": "parallel", "parallel.axes.shard": 2}, id="fsdp"),
    pytest.param(
        {"stack": "deepspeed", "deepspeed.zero_optimization.stage": 1},
        id="zero1",
        marks=needs_deepspeed,
    ),
    pytest.param(
        {"stack": "deepspeed", "deepspeed.zero_optimization.stage": 3},
        id="zero3",
        marks=needs_deepspeed,
    ),
]


@pytest.mark.parametrize("stack", STACKS)
def test_whole_weights_are_seen_and_written(stack: dict[str, Any], tmp_path: Path) -> None:
    with Chain(settings(tmp_path / "alone", steps=1)) as alone:
        weights = dict(alone.model_state_dict())
    for rank in run_processes(looked_at, str(tmp_path / "two"), stack, world_size=2):
        for name, weight in weights.items():
            assert torch.equal(rank["before"][name], weight)
            assert torch.equal(rank["written"][name], 2 * weight)
            assert torch.equal(rank["trained"][name], 2 * weight)


class Tied(dl.Runner):
    def __init__(self, config: dict[str, Any], weight: float) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 8, bias=False))
        nn.init.constant_(self.model[0].weight, weight)
        self.model[1].weight = self.model[0].weight


def pretrained(root: str, stack: dict[str, Any], file: str) -> tuple[list[str], list[float], bool]:
    with Tied(
        {"dir": f"{root}/run", "pretrained": file, "optim": {"type": "sgd", "lr": 0.1}, **stack},
        0.0,
    ) as runner:
        with runner.whole_weights():
            weights = dict(runner.unwrapped_model.named_parameters())
            values = [float(weight.detach().mean()) for weight in weights.values()]
        model = runner.unwrapped_model
        return sorted(runner.model_state_dict()), values, model[1].weight is model[0].weight


@pytest.mark.parametrize("stack", STACKS)
def test_tied_weight_under_one_of_its_names_is_loaded(
    stack: dict[str, Any], tmp_path: Path
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    file = tmp_path / "one_name.safetensors"
    safetensors.save_file({"0.weight": torch.full((8, 6), 3.0)}, file)
    for names, values, is_tied in run_processes(
        pretrained, str(tmp_path), stack, str(file), world_size=2
    ):
        assert names == ["0.weight", "1.weight"] and values == [3.0] and is_tied
