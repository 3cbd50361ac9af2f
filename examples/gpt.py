"""A character-level GPT on English text that is on every machine: the documentation topics that ship with CPython.

python examples/gpt.py                                            # one core: about 4 minutes
python examples/gpt.py --data.path my.txt                         # any text file (UTF-8)
python examples/gpt.py --auto_resume true                         # after a kill: goes on from the latest checkpoint
python examples/gpt.py --auto_resume true --steps 4800            # after the end: trains on to step 4800
python examples/gpt.py --resume experiments/.../latest.pth        # a checkpoint by its path
torchrun --nproc-per-node 2 examples/gpt.py                       # two processes, 8 sequences an update on each
torchrun --nproc-per-node 4 examples/gpt.py --stack parallel --parallel.axes.shard 2 --parallel.axes.tensor 2   # on a mesh
torchrun --nproc-per-node 2 examples/gpt.py --stack parallel --parallel.axes.pipeline 2 --model.tied false --steps 1000    # a pipeline
torchrun --nproc-per-node 2 examples/gpt.py --stack parallel --parallel.axes.expert 2 --model.experts 4 --steps 1000        # experts
python examples/gpt.py --model.width 384 --model.depth 6 --precision bf16     # any key; all of them: --help

The first one ends at about 1.57 bits per character in validation; 4.69 is the entropy of single characters. The pipeline ends at 2.47 bits
after 134 s of processor time, the mixture of experts at 2.24 bits after 159 s. The text is that
of the running Python, so the figures move a little with its version. Without --auto_resume or --resume a run starts from scratch.
"""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl


class GPTConfig(dl.RunnerConfig):
    """Settings of this example; the command line goes above them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lineage = "gpt"
        self.seed = 1
        self.steps = 3600
        self.max_grad_norm = 1.0
        self.data.path = None
        self.data.held_out = 0.05
        self.model = {
            "context": 128,
            "width": 128,
            "depth": 2,
            "heads": 4,
            "dropout": 0.0,
            "tied": True,
            "experts": 0,
        }
        self.dataloader.batch_size = 8
        self.optim = {"type": "adamw", "lr": 4e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
        self.scheduler = {"type": "cosine", "warmup_steps": 0.1, "final_lr_ratio": 0.05}
        self.checkpoint.keep_latest_k = 3


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Stretches of a text, each with the same stretch one character on as its target.

    Args:
        tokens: The text, int64 of shape (length,).
        context: Length of a stretch.
        stride: Distance between the beginnings of two stretches.
    """

    def __init__(self, tokens: Tensor, context: int, stride: int) -> None:
        self.windows = tokens.unfold(0, context + 1, stride)  # a view: nothing is copied

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.windows[index]
        return window[:-1], window[1:]


class GPTRunner(dl.Runner):
    """Trains on every stretch of the text but its end, and validates on the end."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        path = self.config.data.path
        text = (
            Path(path).read_text(encoding="utf-8")
            if path
            else "\n".join(topics[name] for name in sorted(topics))
        )
        self.alphabet = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.alphabet)}
        tokens = torch.tensor([codes[character] for character in text])
        held_out = int(len(tokens) * self.config.data.held_out)
        context = self.config.model.context
        self.datasets = {
            "train": Windows(tokens[:-held_out], context, stride=1),
            "val": Windows(tokens[-held_out:], context, stride=context),
        }
        self.model = GPT(len(self.alphabet), **self.config.model)
        self.criterion = nn.CrossEntropyLoss()
        self.unigram_entropy = entropy(tokens)

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of all positions; `pred` is (B, T, characters), `target` (B, T)."""
        loss: Tensor = super().compute_loss(pred.flatten(0, 1), target.flatten())
        return loss

    def sample(self, count: int = 200) -> str:
        """Return text that the model writes."""
        model: Any = self.unwrapped_model.eval()
        tokens = model.generate(
            torch.zeros(1, 1, dtype=torch.long, device=self.device), count, temperature=0.8
        )
        return "".join(self.alphabet[code] for code in tokens[0, 1:].tolist())


def entropy(tokens: Tensor) -> float:
    """Return the entropy of the character frequencies in bits: the best that is possible without context."""
    share = torch.bincount(tokens).double() / len(tokens)
    return float(-(share * share.clamp_min(1e-12).log2()).sum())


if __name__ == "__main__":
    config = GPTConfig()
    config.parse()
    with GPTRunner(config) as runner:
        runner.train()
        train, val = (
            (runner.latest_result or {})[split]["loss"] / math.log(2) for split in ("train", "val")
        )
        if runner.is_main_process:
            if runner.stack == "ddp":  # a divided model would have to be called by all ranks
                print(f"\n{runner.sample()}\n")
            print(
                f"{train:.3f} bits per character in training, {val:.3f} in validation, after {runner.steps} steps"
            )
            print(f"{runner.unigram_entropy:.3f} bits is the entropy of single characters")
            print(f"run directory: {runner.workspace.dir}")
