"""G6b: with `gradient_sum: canonical` a run ends in one SHA-256 at any number of processes, also where that number changes.

The usual sums are compared too: they must end in another hash for each number of processes, so that these tests can fail.
"""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.utils.tensors import whole

SAMPLES = 41
"""Two updates of 16 samples a pass and one of 9: five micro-batches of 4 at most, the last of one sample."""


class Noisy(Dataset[dict[str, Any]]):
    """Points, or tokens, that are augmented anew each time they are read."""

    def __init__(self, length: int, *, tokens: bool) -> None:
        draw = torch.Generator().manual_seed(7)
        self.tokens = tokens
        self.rows = (
            torch.randint(0, 29, (length, 12), generator=draw) if tokens else torch.randn(length, 10, generator=draw)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        if self.tokens:
            noisy = torch.where(torch.rand(len(row)) < 0.1, torch.randint(0, 29, row.shape), row)
            target = row.roll(-1)
            target[-1 - index % 3 :] = -100  # so that micro-batches have different weights
            return {"input": noisy, "target": target}
        return {"input": row + 0.1 * torch.randn(10), "target": row[:5].argmax()}


class GPT(nn.Module):
    """A decoder of two blocks, whose head has the weights of the embedding."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(29, width), nn.Embedding(12, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `(batch, 29, sequence)`."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        states = self.embed(tokens) + self.place(torch.arange(length))
        for block in self.blocks:
            states = block(states, src_mask=mask, is_causal=True)
        return self.head(self.norm(states)).transpose(1, 2)


class AnySize(dl.Runner):
    """Trains one of the two models, and kills its last process where it is told."""

    kill_at: int | None = None

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        torch.manual_seed(3)
        tokens = self.config.model_kind == "gpt"
        mlp = (nn.Linear(10, 23), nn.LayerNorm(23), nn.GELU(), nn.Dropout(0.1), nn.Linear(23, 5))
        self.model = GPT() if tokens else nn.Sequential(*mlp)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": Noisy(SAMPLES, tokens=tokens), "val": Noisy(19, tokens=tokens)}
        self.losses: list[float] = []

    def step(self) -> Any:
        """Die in the middle of an update where it is told, and note the loss and the norm of each."""
        last = self.rank == self.world_size - 1
        if self.kill_at is not None and self.state.train.global_step == self.kill_at and last:
            os.kill(os.getpid(), signal.SIGKILL)
        outcome = super().step()
        self.losses += [float(outcome.loss), float(outcome.grad_norm)]
        return outcome


def settings(root: Path, model: str = "mlp", **more: Any) -> dict[str, Any]:
    return {
        "model_kind": model,
        "gradient_sum": "canonical",
        "epochs": 3,
        "seed": 4,
        "workspace_root": str(root),
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "reducelronplateau", "patience": 0, "factor": 0.7},
        "ema": {"enabled": True, "decay": 0.9},
        "max_grad_norm": 0.5,
        "checkpoint": {"interval": 1, "async_enabled": False},
        "dataloader": {"global_batch_size": 16, "micro_batch_size": 4, "drop_last": False},
        **more,
    }


def train(config: dict[str, Any], kill_at: int | None = None, threads: int = 1) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with AnySize(config) as runner:
        runner.kill_at = kill_at
        runner.train()
        weights = [whole(p.detach()) for p in runner.unwrapped_model.parameters()]
        states = [runner.optimizer.state[p] for p in runner.unwrapped_model.parameters()]
        moments = [whole(state[name]) for state in states for name in sorted(state)]
        averages = [whole(runner.ema.weights[name]) for name in sorted(runner.ema.weights)]
        found = hashlib.sha256()
        for tensor in (*weights, *moments, *averages):
            found.update(tensor.contiguous().numpy().tobytes())
        results = {
            step: {split: figures["loss"] for split, figures in of.items()} for step, of in runner.results.items()
        }
        return {"hash": found.hexdigest(), "losses": runner.losses, "results": results, "weights": weights}


def outcome_of(ranks: list[dict[str, Any]]) -> tuple[str, dict[int, Any]]:
    """Return what a run ended in, after a look at whether all its ranks agree."""
    assert all(rank["hash"] == ranks[0]["hash"] and rank["results"] == ranks[0]["results"] for rank in ranks)
    return ranks[0]["hash"], ranks[0]["results"]


FSDP = {"stack": "parallel", "parallel": {"axes": {"shard": -1}}}
REPLICATE = {"stack": "parallel", "parallel": {"axes": {"replicate": -1}}}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "precision", "sizes"),
    [
        ("mlp", None, [(2, {}), (3, {})]),
        pytest.param("mlp", None, [(4, {}), (5, {}), (8, {}), (2, REPLICATE)], marks=slow),
        pytest.param("mlp", "bf16", [(2, {}), (3, {}), (4, {}), (5, {}), (8, {})], marks=slow),
        pytest.param("gpt", None, [(2, {}), (3, {}), (4, {}), (5, {}), (8, {})], marks=slow),
        pytest.param("gpt", "bf16", [(2, {}), (3, {}), (4, {}), (5, {}), (8, {})], marks=slow),
    ],
)
def test_one_hash(model: str, precision: str | None, sizes: list[tuple[int, dict[str, Any]]], tmp_path: Path) -> None:
    """Five processes are more than the micro-batches of an update, eight more than those of the first ones too."""
    more = {"precision": precision}
    expected = outcome_of(run_processes(train, settings(tmp_path / "1", model, **more), world_size=1))
    for number, (world_size, stack) in enumerate(sizes):
        config = settings(tmp_path / f"{number}", model, **more, **stack)
        assert outcome_of(run_processes(train, config, world_size=world_size)) == expected
    fast = {**more, "gradient_sum": "fast"}
    hashes = [
        outcome_of(run_processes(train, settings(tmp_path / f"fast{size}", model, **fast), world_size=size))[0]
        for size in (1, 2)
    ]
    assert len({expected[0], *hashes}) == 3
