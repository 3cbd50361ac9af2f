"""The trainings that the benchmarks share, without this library: an MLP, small or large, and its loops by hand."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR, LRScheduler
from torch.utils.data import Dataset

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Workload:
    """How large the training is.

    Attributes:
        widths: Sizes of the layers, from the input to the output.
        batch_size: Samples of a batch.
        block: Updates that are timed together.
    """

    widths: tuple[int, ...]
    batch_size: int
    block: int


OVERHEAD = Workload((64, 96, 36, 10), 32, 2000)
"""10,102 parameters: what is not computing counts."""
COMPUTE = Workload((256, 1024, 1024, 10), 256, 40)
"""1.3 million parameters: only computing counts."""
WORKLOADS = {"10k parameters": OVERHEAD, "1.3M parameters": COMPUTE}


def make_batches(workload: Workload = OVERHEAD) -> Batches:
    """Return a pass of 100 batches."""
    generator = torch.Generator().manual_seed(0)
    size, features = workload.batch_size, workload.widths[0]
    return [
        (torch.randn(size, features, generator=generator), torch.randint(10, (size,), generator=generator))
        for _ in range(100)
    ]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """The samples of a pass one by one, as users' datasets give them; nothing is drawn.

    Args:
        batches: The pass.
    """

    def __init__(self, batches: Batches) -> None:
        self.inputs = torch.cat([input for input, _ in batches])
        self.targets = torch.cat([target for _, target in batches])

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


def make_model(workload: Workload = OVERHEAD) -> nn.Module:
    """Return the MLP."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for into, out in pairwise(workload.widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return AdamW as torch builds it, and a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=100_000)


def updates_by_hand(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Iterator[None]:
    """Train pass after pass, yielding after each update; the loss is neither read nor checked."""
    optimizer, scheduler = make_optimizer(model)
    model.train()
    while True:
        for input, target in batches:
            loss = criterion(model(input), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield


def updates_with_accelerate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Train as the documentation of Accelerate shows, yielding after each update.

    Args:
        model: The model as it was built.
        batches: A list, or a loader of torch, which is prepared.
    """
    from accelerate import Accelerator

    accelerator, criterion = Accelerator(cpu=True), nn.CrossEntropyLoss()
    model, optimizer, scheduler = accelerator.prepare(model, *make_optimizer(model))
    if not isinstance(batches, list):
        batches = accelerator.prepare(batches)
    model.train()
    while True:
        for input, target in batches:
            with accelerator.accumulate(model):
                loss = criterion(model(input), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield
