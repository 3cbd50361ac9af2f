"""The trainings that the benchmarks share, without this library: an MLP, small or large, and its loops by hand."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler
from torch.utils.data import Dataset

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Workload:
    """How large the training is.

    Attributes:
        widths: Sizes of the layers, from the input to the output.
        batch_size: Samples of a batch.
        block: Updates that are timed together.
        batches: Batches of a pass.
        by_function: Whether criterion and schedule are functions of the user's, which the library knows nothing about.
    """

    widths: tuple[int, ...]
    batch_size: int
    block: int
    batches: int = 100
    by_function: bool = False


OVERHEAD = Workload((64, 96, 36, 10), 32, 2000)
"""10,102 parameters: what is not computing counts."""
COMPUTE = Workload((256, 1024, 1024, 10), 256, 40)
"""1.3 million parameters: only computing counts."""
SMALL = Workload((24, 64, 44, 10), 32, 1280, batches=128, by_function=True)
"""4,910 parameters, 128 batches a pass: what a user's small model costs."""
WORKLOADS = {"10k parameters": OVERHEAD, "1.3M parameters": COMPUTE}


def make_batches(workload: Workload = OVERHEAD) -> Batches:
    """Return the batches of a pass."""
    generator = torch.Generator().manual_seed(0)
    size, features = workload.batch_size, workload.widths[0]
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(10, (size,), generator=generator),
        )
        for _ in range(workload.batches)
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


def own_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Return the loss, as a criterion that a user has written."""
    return cross_entropy(pred, target)


def own_rate(step: int) -> float:
    """Return the factor of the rate, as a schedule that a user has written."""
    return 1.0 / (1.0 + 1e-5 * step)


def make_criterion(workload: Workload = OVERHEAD) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the criterion."""
    return own_loss if workload.by_function else nn.CrossEntropyLoss()


def make_optimizer(
    model: nn.Module, workload: Workload = OVERHEAD
) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """Return AdamW as torch builds it, and a schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if workload.by_function:
        return optimizer, LambdaLR(optimizer, own_rate)
    return optimizer, LinearLR(optimizer, 1.0, 0.1, total_iters=100_000)


def updates_by_hand(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    criterion: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    workload: Workload = OVERHEAD,
) -> Iterator[None]:
    """Train pass after pass, yielding after each update; the loss is neither read nor checked."""
    optimizer, scheduler = make_optimizer(model, workload)
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


def updates_with_accelerate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], workload: Workload = OVERHEAD
) -> Iterator[None]:
    """Train as the documentation of Accelerate shows, yielding after each update.

    Args:
        model: The model as it was built.
        batches: A list, or a loader of torch, which is prepared.
        workload: Of which criterion and schedule are.
    """
    from accelerate import Accelerator

    accelerator, criterion = Accelerator(cpu=True), make_criterion(workload)
    model, optimizer, scheduler = accelerator.prepare(model, *make_optimizer(model, workload))
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
