"""GPT-2 with 124 million parameters in bf16, trained by the runner and by the same loop written by hand.

Model FLOPs utilisation is that of 6 N + 12 L T W operations a token (Chowdhery et al., PaLM, 2022, appendix B) and the dense peak of the
data sheet. The batches are a user's `Dataset` of tokens through a `DataLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

import danling as dl
from danling.reporting import device_peak_flops

from .trainings import DEVICE, ON_CPU, settings, timed

LEARNING_RATE, MAX_NORM, DECAY_STEPS = 6e-4, 1.0, 100_000


@dataclass(frozen=True)
class Size:
    """How large the training is.

    Attributes:
        model: Arguments of the model.
        batch_size: Sequences of an update.
        block: Updates that are timed together.
        rounds: Interleaved rounds.
    """

    model: Mapping[str, int]
    batch_size: int
    block: int
    rounds: int

    @property
    def tokens(self) -> int:
        """Tokens of an update."""
        return self.batch_size * self.model["context"]


_TINY = Size(
    {"vocab_size": 97, "context": 16, "width": 32, "depth": 2, "heads": 2}, 4, block=2, rounds=1
)
_GPT2 = {"vocab_size": 50257, "context": 1024, "width": 768, "depth": 12, "heads": 12}
"""GPT-2's smallest model (Radford et al., 2019): 124 million parameters."""

SMALLEST = _TINY if ON_CPU else Size(_GPT2, 16, block=40, rounds=3)
BILLION = (
    _TINY
    if ON_CPU
    else Size({**_GPT2, "context": 256, "width": 1792, "depth": 24, "heads": 14}, 1, 1, 1)
)
"""1.0 billion parameters, on batches of one short sequence: for saves."""


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    """Random sequences, each made when it is read."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Arithmetic instead of a random stream: both loops read the same, and neither pays for drawing it.
        tokens = (torch.arange(self.length + 1) * (2 * index + 1) + index) % self.vocabulary
        return tokens[:-1], tokens[1:]


def build_model(size: Size) -> nn.Module:
    """Return the model, with the same weights each time."""
    torch.manual_seed(0)
    sizes = size.model
    return GPT(
        sizes["vocab_size"],
        context=sizes["context"],
        width=sizes["width"],
        depth=sizes["depth"],
        heads=sizes["heads"],
    )


def build_optimizer(
    model: nn.Module, fused: bool | None = None
) -> tuple[torch.optim.Optimizer, LinearLR]:
    """Return optimizer and schedule, the same in both loops."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=not ON_CPU if fused is None else fused
    )
    return optimizer, LinearLR(optimizer, 1.0, 0.1, DECAY_STEPS)


class Benchmarked(dl.TorchRunner):
    """The runner over the data set, with the optimizer of the loop by hand."""

    def __init__(self, config: dict[str, Any], size: Size) -> None:
        super().__init__(config)
        self.model = build_model(size).to(self.device)
        self.criterion = nn.CrossEntropyLoss()
        # Canonical sums need an optimizer whose arithmetic does not depend on how parameters are divided.
        fused = False if self.config.gradient_sum == "canonical" else None
        self.optimizer, self.scheduler = build_optimizer(self.model, fused)
        self.datasets = {"train": Tokens(size.model["vocab_size"], size.model["context"])}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the loss of all positions."""
        return super().compute_loss(pred.flatten(0, 1), target.flatten())


def by_runner(
    name: str, size: Size, *, workers: int = 0, **more: Any
) -> tuple[dl.TorchRunner, Callable[[], None]]:
    """Return a runner in a directory of a name, and a function that makes one block of updates with it."""
    loader = {
        "batch_size": size.batch_size,
        "num_workers": workers,
        # Each block is a call of `train_steps`; the loop by hand keeps its workers too.
        "persistent_workers": workers > 0,
        "shuffle": False,
        **more.pop("dataloader", {}),
    }
    config = settings(
        name, steps=0, precision="bf16", max_grad_norm=MAX_NORM, dataloader=loader, **more
    )
    runner = Benchmarked(config, size)

    def block() -> None:
        runner.config.steps = (runner.config.steps or 0) + size.block
        runner.train_steps()

    return runner, block


def by_hand(size: Size, *, compiled: bool = False, workers: int = 0) -> Callable[[], None]:
    """Return a function that makes one block of updates."""
    model, criterion = build_model(size).to(DEVICE), nn.CrossEntropyLoss()
    optimizer, scheduler = build_optimizer(model)
    forward = torch.compile(model) if compiled else model
    model.train()
    data = Tokens(size.model["vocab_size"], size.model["context"])
    loader = DataLoader(data, size.batch_size, num_workers=workers, pin_memory=not ON_CPU)

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    batches = endless()

    def block() -> None:
        for _ in range(size.block):
            inputs, targets = (part.to(DEVICE, non_blocking=True) for part in next(batches))
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = criterion(forward(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    return block


def gap_share(block: Callable[[], object]) -> float | None:
    """Return the share of a block in which no kernel runs, from the first kernel to the end of the last; `None` on the CPU."""
    if ON_CPU:
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        timed(block)
    events = profile.events() or []
    spans = sorted(
        (e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"
    )
    busy, reached = 0.0, float(spans[0][0])
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return round(1 - busy / (reached - float(spans[0][0])), 4)


def utilisation(size: Size, tokens_per_second: float) -> float | None:
    """Return the share of the device's peak that the model's own arithmetic takes; `None` where the peak is not known."""
    peak = None if ON_CPU else device_peak_flops(DEVICE, "bf16")
    if peak is None:
        return None
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build_model(size).parameters())
    attention = 12 * size.model["depth"] * size.model["context"] * size.model["width"]
    return round((6 * parameters + attention) * tokens_per_second / peak, 4)
