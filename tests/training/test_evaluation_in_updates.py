"""An evaluation in `train_step`, between the micro-batches of an update, changes nothing on any rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import differences, settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Centered(nn.Module):
    """Subtracts a running mean, which each rank has of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean + 0.3 * (inputs.detach().mean(0) - self.mean)
        output: Tensor = self.layer(inputs - self.mean)
        return output


class Sized(Centered):
    """Its mean is that of the first batch, which gives the buffer its size, and moves from there."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.tensor([])

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.mean.numel():
            self.mean.resize_(3).copy_(inputs.mean(0))
        return super().forward(inputs)


class Looks(dl.Runner):
    def __init__(self, config: Mapping[str, Any], verb: str, model: type[nn.Module]) -> None:
        super().__init__(config)
        self.verb = verb
        inputs = torch.arange(96.0).reshape(32, 3).sin()
        self.datasets = {
            "train": TensorDataset(inputs, inputs[:, :1]),
            "val": TensorDataset(inputs[:4], inputs[:4, :1]),
        }
        self.model, self.criterion = model(), nn.MSELoss()
        if self.config.get("phases"):
            layer: Any = self.model.layer
            self.optimizer = {
                "scale": torch.optim.SGD([layer.weight], lr=0.1),
                "shift": torch.optim.SGD([layer.bias], lr=0.1),
            }

    def look(self) -> None:
        if self.verb:
            getattr(self, self.verb)("val")

    def train_step(self, data: Any) -> Any:
        if not self.config.get("phases"):
            self.look()
            return super().train_step(data)
        inputs, targets = data
        # The last block is due in each second pass only.
        for name, every in (("scale", 1), ("shift", 2)):
            with self.optimizing(name, every=every) as is_due:
                self.look()
                if is_due:
                    self.backward(self.compute_loss(self.model(inputs), targets))
        return None, None


def trained(
    root: Path, verb: str, more: dict[str, Any], model: type[nn.Module] = Centered
) -> list[dict[str, Tensor]]:
    """Return the weights and buffers of this rank after each of two trainings of one update."""
    found = []
    with Looks(
        settings(
            root / (verb or "none"), steps=1, accum_steps=3, dataloader={"batch_size": 2}, **more
        ),
        verb,
        model,
    ) as runner:
        for steps in (1, 2):
            runner.config.steps = steps
            runner.train()
            found.append(
                {
                    name: value.detach().clone()
                    for name, value in runner.unwrapped_model.state_dict().items()
                }
            )
    return found


STACKS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "blocks of several optimizers": {"phases": True},
    "averages": {"ema": {"enabled": True, "decay": 0.5}},
    "replicate": {"stack": "parallel", "parallel": {"axes": {"replicate": 2}}},
    "accelerate": {"stack": "accelerate"},
}


@pytest.mark.parametrize("verb", ["evaluate", "infer"])
@pytest.mark.parametrize("stack", STACKS)
def test_evaluation_between_micro_batches_leaves_each_rank_its_buffers(
    stack: str, verb: str, tmp_path: Path
) -> None:
    plain = run_processes(trained, tmp_path, "", STACKS[stack], world_size=2, timeout=60)
    looked = run_processes(trained, tmp_path, verb, STACKS[stack], world_size=2, timeout=60)
    assert differences(plain, looked) == []


def test_evaluation_between_micro_batches_leaves_a_buffer_without_a_size(tmp_path: Path) -> None:
    plain = run_processes(trained, tmp_path, "", {}, Sized, world_size=2, timeout=60)
    looked = run_processes(trained, tmp_path, "evaluate", {}, Sized, world_size=2, timeout=60)
    assert differences(plain, looked) == []
