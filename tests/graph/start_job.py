"""A program that `test_start.py` starts: trains with compiled code out of a folder, and tells what came of it as JSON.

python start_job.py SETTINGS
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Block(nn.Module):
    """A layer whose activations are larger than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.dropout = nn.Linear(4, 16), nn.Linear(16, 4), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs + self.narrow(self.dropout(torch.tanh(self.wide(inputs))))
        return output


class Toy(dl.Runner):
    """Regresses random points, in float64."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        inputs = torch.randn(8, 4, generator=generator).double()
        self.datasets = {"train": TensorDataset(inputs, inputs.flip(0))}
        self.model = nn.Sequential(Block(), Block()).double()
        self.criterion = nn.MSELoss()


def error_of_gradient(runner: Toy) -> float:
    """Return how far the gradient of a micro-batch is from a central difference along a direction, relative to it."""
    batch = runner.datasets["train"][:4]
    parameters = list(runner.model.parameters())
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]

    def loss() -> float:
        runner.zero_gradients()
        runner.window.reset()
        torch.manual_seed(5)
        return float(runner.train_step(batch)[1].detach())

    loss()
    slope = sum(
        float((p.grad * d).sum()) for p, d in zip(parameters, direction) if p.grad is not None
    )
    ends, step = [], 1e-5
    for sign in (1.0, -1.0):
        for parameter, along in zip(parameters, direction):
            parameter.data += sign * step * along
        ends.append(loss())
        for parameter, along in zip(parameters, direction):
            parameter.data -= sign * step * along
    difference = (ends[0] - ends[1]) / (2 * step)
    return abs(slope - difference) / abs(difference)


def main(settings: str) -> None:
    torch.set_num_threads(1)
    config = {
        "seed": 1,
        "steps": 3,
        "dataloader": {"batch_size": 2},
        "optim": {"type": "sgd", "lr": 0.1},
    }
    with Toy(config | json.loads(settings)) as runner:
        runner.train()
        weights = b"".join(
            bytes(p.detach().view(torch.uint8).flatten().tolist())
            for p in runner.model.parameters()
        )
        found = {
            "weights": hashlib.sha256(weights).hexdigest(),
            "graphs": runner.compilation.graphs if runner.compilation is not None else 0,
            **({"error": error_of_gradient(runner)} if runner.stack == "graph" else {}),
        }
        if runner.is_main_process:
            print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
