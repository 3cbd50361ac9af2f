"""LBFGS, whose step takes a closure, with the two hooks overridden that its error names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import danling as dl


class Toy(dl.Runner):
    """A linear model over a list of samples."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        points = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        self.datasets = {"train": [(point, torch.tensor(int(point.sum() > 0))) for point in points]}


def settings(root: Path, steps: int, **more: Any) -> dict[str, Any]:
    base = {"seed": 1, "steps": steps, "dir": str(root), "log": False, "dataloader": {"batch_size": 8}}
    return {**base, **more}


class Closing(Toy):
    """Trains with LBFGS, as the message asks for."""

    not_saved = ("batch",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.1)

    def train_step(self, data: Any) -> Any:
        self.batch = data
        return super().train_step(data)

    def step(self) -> Any:
        return super().step()

    def optimizer_step(self) -> None:

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.criterion(self.model(self.batch[0]), self.batch[1])
            loss.backward()
            return loss

        self.optimizer.step(closure)


def test_lbfgs_with_both_hooks_overridden_trains_and_resumes(tmp_path: Path) -> None:
    weights = []
    for runs in ([("whole", 6)], [("parts", 3), ("parts", 6)]):
        for name, steps in runs:
            with Closing(settings(tmp_path / name, steps, auto_resume=True)) as runner:
                before = runner.model.weight.detach().clone()
                runner.train()
                weights.append(runner.unwrapped_model.weight.detach().clone())
                assert not torch.equal(before, weights[-1])
    assert torch.equal(weights[0], weights[2])
