"""The small training that the benchmarks share, without this library: ten thousand parameters, batches in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler

Batches = list[tuple[Tensor, Tensor]]


def make_batches() -> Batches:
    """Return a pass of 100 batches."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)) for _ in range(100)
    ]


def make_model() -> nn.Module:
    """Return an MLP of 10,186 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 36), nn.ReLU(), nn.Linear(36, 10))


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return AdamW as torch builds it, and a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=100_000)
