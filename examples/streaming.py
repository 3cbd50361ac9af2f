"""A stream without an end: an `IterableDataset` that divides itself over ranks and workers and remembers its place.

python examples/streaming.py                              # 9 s of processor time
python examples/streaming.py --auto_resume true --steps 2000          # goes on in the stream where it was
torchrun --nproc-per-node 2 examples/streaming.py --dataloader.num_workers 2

The task is to add two numbers of two digits, written as text. After 96,000 samples all of 2,000 held-out sums are right. There are
no epochs: the budget is `steps`. With `state_dict` and `load_state_dict` the stream goes on bitwise; without them it would be read
again from its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info

import danling as dl

DIGITS = 10


class Sums(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields four digits (4,) and the sum of the two numbers that they write, in [0, 198].

    Args:
        seed: Of the stream.
        rank: Which of the streams this is.
        world_size: How many of them there are.
    """

    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        number, of = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        stream, streams = self.rank * of + number, self.world_size * of
        while True:
            # Sample i of a stream is a function of (seed, i), so a place in it is one integer.
            index = self.position * streams + stream
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
            self.position += 1
            digits = torch.randint(DIGITS, (4,), generator=generator)
            yield digits, digits[0] * 10 + digits[1] + digits[2] * 10 + digits[3]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the stream."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place in the stream."""
        self.position = int(state["position"])


class Adder(nn.Module):
    """Embeds four digits and classifies their sum."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.digits = nn.Embedding(4 * DIGITS, width)
        self.head = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 199))

    def forward(self, digits: Tensor) -> Tensor:
        """Return scores (B, 199) of digits (B, 4)."""
        places = digits + DIGITS * torch.arange(4, device=digits.device)
        scores: Tensor = self.head(self.digits(places).sum(1))
        return scores


class StreamRunner(dl.Runner):
    """Trains on the stream, and validates on a part of another one."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        domain = self.data_domain
        held_out = Sums(self.seed + 1, 0, 1)
        self.datasets = {
            "train": Sums(self.seed, domain.rank, domain.size),
            "val": [sample for sample, _ in zip(held_out, range(2000))],
        }
        self.model = Adder()
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="streaming", steps=1500, score_name="acc", evaluate_interval=500
    )
    config.dataloader.batch_size = 64
    config.optim = {"type": "adamw", "lr": 5e-3}
    config.scheduler = {"type": "cosine", "warmup_steps": 0.1}
    config.parse()
    with StreamRunner(config) as runner:
        runner.train()
        runner.print(
            f"{runner.latest_score:.3f} of the sums are right after {runner.train_state.samples} samples"
        )
