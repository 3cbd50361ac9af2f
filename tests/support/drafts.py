"""A target for draft models that is no network: a Markov chain, whose hidden states say exactly what comes next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculative.language import Language
from speculative.runners import DraftConfig, DraftRunner
from torch import Tensor

TOKENS, WIDTH, LENGTH = 12, 16, 24
LANGUAGE = Language(TOKENS, preferred=0.9)


def write_target(directory: str | Path) -> None:
    """Write embedding, head and counts of tokens as those of a target lie in its directory."""
    Path(directory).mkdir()
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(TOKENS, WIDTH, generator=generator)
    save_file(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": torch.eye(TOKENS, WIDTH)},
        Path(directory) / "model.safetensors",
    )
    counts = torch.bincount(torch.cat([LANGUAGE.sample(i, LENGTH) for i in range(50)]), minlength=TOKENS)
    torch.save(counts, Path(directory) / "token_counts.pt")


def captured(count: int, seed: int, *, prompt: int = 4) -> list[dict[str, Tensor]]:
    """Return samples as they come out of a store."""
    probabilities = torch.full((TOKENS, TOKENS), 1e-4)
    for row, share in zip(LANGUAGE.successors, (LANGUAGE.preferred, 1 - LANGUAGE.preferred)):
        probabilities[torch.arange(TOKENS - 1), row] += share
    table = torch.zeros(TOKENS, WIDTH)
    table[:, :TOKENS] = probabilities.log()
    hidden = torch.randn(TOKENS, 3 * WIDTH, generator=torch.Generator().manual_seed(1))
    samples = []
    for index in range(count):
        tokens = LANGUAGE.sample(index, LENGTH, seed)
        samples.append(
            {
                "input_ids": tokens,
                "loss_mask": torch.arange(LENGTH) >= prompt,
                "features": hidden[tokens],
                "final": table[tokens],
                "index": torch.tensor(index),
            }
        )
    return samples


def draft_config(steps: int | None, batch_size: int = 2, **settings: object) -> DraftConfig:
    """Return settings of a small run on the target in `target`."""
    config = DraftConfig(steps=steps, log=False)
    config.target.path = "target"
    config.draft = {"heads": 2, "depth": 1, "steps": 4, "vocabulary": 10, "block": 5, "anchors": 8}
    config.optim.lr = 1e-2
    config.dataloader.batch_size = batch_size
    for name, value in settings.items():
        config[name] = value
    return config


def with_samples(kind: type[DraftRunner], train: Any, val: Any = None) -> Callable[[DraftConfig], DraftRunner]:
    """Return what makes a runner of a draft on datasets."""
    return partial(kind, train=train, val=val)
