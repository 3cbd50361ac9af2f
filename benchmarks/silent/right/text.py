"""Sentences with unequal numbers of labels, and a small language model: what the right scripts train on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY, LENGTH, BATCH = 32, 12, 4


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens, and as labels the next ones; the labels of the prompt, of any length, are -100."""

    def __init__(self, count: int = 96) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        prompts = torch.randint(LENGTH - 1, (count, 1), generator=generator)
        self.labels = ((3 * self.tokens + 1) % VOCABULARY).masked_fill(
            torch.arange(LENGTH) < prompts, -100
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Model(nn.Module):
    """Logits of each token from the token alone, with a norm and dropout."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16), nn.LayerNorm(16)
        )
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.body(self.embed(input_ids)))
        return logits


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of the labels that count."""
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )


def windows(accumulate: int, number: int = 3) -> Iterator[tuple[list[dict[str, Tensor]], Tensor]]:
    """Yield the micro-batches of this rank for some updates, and how many labels of the update count on all ranks."""
    data = Sentences()
    batches = iter(DataLoader(data, BATCH, sampler=DistributedSampler(data)))
    for _ in range(number):
        window = [next(batches) for _ in range(accumulate)]
        count = torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum()
        dist.all_reduce(count)
        yield window, count


def options() -> Any:
    """Return the options of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument(
        "--constant", action="store_true", help="divide by a constant, not by the number of labels"
    )
    parser.add_argument("--stage", type=int, default=0)
    return parser.parse_args()
