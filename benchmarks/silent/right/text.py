"""Sentences with unequal numbers of labels, and a small language model: what the right scripts train on."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY, LENGTH, BATCH = 32, 12, 4


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens, and as labels the next ones; the labels of the prompt, of any length, are -100."""

    def __init__(self, count: int = 96) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        prompts = torch.randint(LENGTH - 1, (count, 1), generator=generator)
        self.labels = ((3 * self.tokens + 1) % VOCABULARY).masked_fill(torch.arange(LENGTH) < prompts, -100)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class Model(nn.Module):
    """Logits of each token from the token alone, with a norm and dropout."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16), nn.LayerNorm(16))
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.head(self.body(self.embed(input_ids)))
        return logits


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of the labels that count."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def options() -> Any:
    """Return the options of a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--stage", type=int, default=0)
    return parser.parse_args()
