"""A language model on a mixture of two sources: English text and Python code, both from the running Python.

python examples/mixture.py                                # 50 s of processor time
python examples/mixture.py --data.weights.code 0.9 --data.weights.text 0.1
python examples/mixture.py --auto_resume true --steps 1500     # each source goes on where it was
torchrun --nproc-per-node 2 examples/mixture.py --dataloader.batch_size 4

It prints 2.47 bits a byte of text and 3.02 of code; with weights of 0.1 and 0.9, 2.86 of both. The sources are those of Python 3.11, so the
figures move a little with its version.
"""

from __future__ import annotations

import argparse
import inspect
import math
import tarfile
import typing
from pydoc_data.topics import topics
from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import danling as dl


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of the bytes of a text, one behind the other, each with the same stretch one byte on as its target.

    Args:
        text: The text.
        context: Length of a stretch.
    """

    def __init__(self, text: str, context: int) -> None:
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        self.windows = data.unfold(0, context + 1, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index].long()
        return window[:-1], window[1:]


class MixtureRunner(dl.Runner):
    """Trains on both sources by their weights, and evaluates each by itself."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        context = self.config.model.context
        texts = {
            "text": "\n".join(topics[name] for name in sorted(topics)),
            "code": "\n".join(
                inspect.getsource(module) for module in (argparse, inspect, tarfile, typing)
            ),
        }
        train, self.datasets = {}, {}
        for name, text in texts.items():
            windows = Windows(text, context)
            held_out = len(windows) // 20
            train[name] = Subset(windows, range(len(windows) - held_out))
            self.datasets[f"val_{name}"] = Subset(
                windows, range(len(windows) - held_out, len(windows))
            )
        self.mixture = dl.data.Mixture(train, weights=dict(self.config.data.weights))
        self.datasets["train"] = self.mixture
        self.model = GPT(256, **self.config.model)
        self.criterion = nn.CrossEntropyLoss()

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of all positions; `pred` is (B, T, 256), `target` (B, T)."""
        loss: Tensor = super().compute_loss(pred.flatten(0, 1), target.flatten())
        return loss


def main() -> None:
    """Train, and print bits by source."""
    config = dl.RunnerConfig(
        seed=1, lineage="mixture", steps=1000, max_grad_norm=1.0, score_split="val_text"
    )
    config.data = {"weights": {"text": 0.7, "code": 0.3}}
    config.model = {"context": 64, "width": 96, "depth": 2, "heads": 4}
    config.dataloader.batch_size = 8
    config.optim = {"type": "adamw", "lr": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    config.scheduler = {"type": "cosine", "warmup_steps": 0.1}
    config.parse()
    with MixtureRunner(config) as runner:
        runner.train()
        result: Any = runner.latest_result
        bits = ", ".join(
            f"{result[f'val_{name}']['loss'] / math.log(2):.2f} of {name}"
            for name in ("text", "code")
        )
        runner.print(f"bits a byte: {bits}; after {runner.train_state.global_step} updates")


if __name__ == "__main__":
    main()
