"""What the cases train on, and their options. No fault is in this file."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

RIGHT, RESUME, SEED = (
    "--right" in sys.argv,
    "--resume" in sys.argv,
    int(os.environ.get("SEED", "0")),
)
WIDTH, CLASSES, VOCABULARY, LENGTH = 8, 4, 32, 16


def regression(count: int, seed: int = 0) -> TensorDataset:
    """Return vectors, and the sums of their absolute values."""
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))


def classification(count: int, seed: int = 0, width: int = WIDTH) -> TensorDataset:
    """Return vectors, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, width, generator=generator)
    return TensorDataset(
        inputs, (inputs.abs() @ torch.randn(width, CLASSES, generator=generator)).argmax(1)
    )


def sentences(count: int) -> TensorDataset:
    """Return tokens, and the next ones; the first labels of a sentence, its prompt, do not count."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    prompts = torch.randint(LENGTH - 1, (count, 1), generator=generator)
    labels = ((3 * tokens + 1) % VOCABULARY).masked_fill(torch.arange(LENGTH) < prompts, -100)
    return TensorDataset(tokens, labels)


def network(outputs: int = 1) -> nn.Sequential:
    """Return a network for vectors."""
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, outputs))


def language_model() -> nn.Sequential:
    """Return a network for sentences."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, VOCABULARY)
    )


def loader(data: Dataset, batch: int, seed: int = 0) -> DataLoader:
    """Return a loader of this rank's share of the samples, in a random order."""
    return DataLoader(data, batch, sampler=DistributedSampler(data, seed=seed))


def save(**state: object) -> None:
    """Replace the checkpoint."""
    torch.save(state, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pt")
