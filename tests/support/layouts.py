"""One small run on any layout, and what it did to weights and gradients, for comparison with one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.utils.tensors import canonical_name, whole

VOCABULARY = 12
LENGTH = 8


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens; the targets of each sentence are ignored from a position of its own on, of some altogether."""

    def __init__(self, count: int, dtype: torch.dtype = torch.int64) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)
        self.lengths = torch.randint(0, LENGTH + 1, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.tokens[index, 1:].clone()
        target[self.lengths[index] :] = -100
        return self.tokens[index, :-1], target


class LayoutRunner(dl.Runner):
    """A GPT in float64 that keeps the gradients and the norm of every update."""

    not_saved = ("gradients", "norms")
    stop_at: int | None = None

    def __init__(
        self, config: Mapping[str, Any], *, model: Mapping[str, Any], samples: int = 40
    ) -> None:
        super().__init__(config)
        self.model = self.build(model)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Sentences(samples), "val": Sentences(11)}
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def build(self, model: Mapping[str, Any]) -> nn.Module:
        settings = {
            "context": LENGTH,
            "width": 16,
            "depth": 2,
            "heads": 4,
            "tied": False,
            "dtype": "float64",
            **model,
        }
        dtype: torch.dtype = getattr(torch, settings.pop("dtype"))
        return GPT(VOCABULARY, **settings).to(dtype)

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.flatten(0, 1), target.flatten())

    def step(self) -> Any:
        if self.stop_at is not None and self.state.train.global_step == self.stop_at - 1:
            self.stop()
        return super().step()

    def clip_gradients(self, grad_norm: Tensor) -> None:
        self.norms.append(float(grad_norm))
        self.gradients.append(
            {
                name: whole(p.grad).clone()
                for name, p in self.named_parameters()
                if p.grad is not None
            }
        )
        super().clip_gradients(grad_norm)


def run_layout(
    config: Mapping[str, Any], model: Mapping[str, Any] | None = None, samples: int = 40
) -> dict[str, Any]:
    """Train and return weights, gradients and norms of this rank, whole, and figures of evaluation."""
    with LayoutRunner(config, model=model or {}, samples=samples) as runner:
        runner.train()
        weights = {
            canonical_name(name): whole(value).clone()
            for name, value in runner.model_state_dict().items()
        }
        return {
            "weights": weights,
            "gradients": runner.gradients,
            "norms": runner.norms,
            "results": runner.results,
            "steps": runner.state.train.global_step,
        }
