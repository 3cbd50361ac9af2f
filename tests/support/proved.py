"""A training script that knows nothing of the library, for tests of `danling prove`: right, or with a mistake under a name."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from danling.cli.main import main

from .warm import interpreter

ROOT = Path(__file__).parents[2]

SCRIPT = """
import inspect
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

words = sys.argv[1:]
assert "batch_size" in inspect.signature(DataLoader.__init__).parameters  # Lightning makes loaders anew by it
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
torch.manual_seed(rank if "seeded" in words else 0)
made = torch.Generator().manual_seed(5)
inputs = torch.randint(1, 20, (48, 8), generator=made)
labels = inputs.roll(-1, 1).clone()
for row in range(48):
    labels[row, : int(torch.randint(0, 6, (), generator=made))] = -100


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.up = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32)
        self.head = nn.Linear(32, 20)

    def forward(self, x):
        hidden = self.up(self.norm(self.embedding(x))).relu()
        if "noise" in words:
            hidden = hidden + torch.rand_like(hidden)
        return self.head(F.dropout(hidden, 0.3, self.training))


model = Model()
if "batch norm" in words or "own statistics" in words:
    batch_norm = nn.BatchNorm1d(16, track_running_stats="batch norm" in words)
    model.norm = nn.Sequential(nn.Flatten(0, 1), batch_norm, nn.Unflatten(0, (-1, 8)))
if "fsdp2" in words:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
elif "fsdp1" in words:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params="flat" not in words)
elif world > 1 and "not summed" not in words:
    model = nn.parallel.DistributedDataParallel(model)
if "compiled" in words:
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if "nested" in words:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
sampler = None if "same samples" in words else DistributedSampler(inputs, world, rank)
loader = DataLoader(TensorDataset(inputs, labels), 4, sampler=sampler)
batches = loader
if "own loader" in words or "shown" in words:
    batches = [(inputs[at + rank :: world][:4], labels[at + rank :: world][:4]) for at in range(0, 40, 8)]
if "shown" in words:
    from danling import prove

    assert "danling.runners" not in sys.modules
    batches = prove.batches(batches)
window = 3 if "window" in words else 1
updates = 0
for epoch in range(1 if "one update" in words else 4):
    for number, (x, y) in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in words):
            out = model(x).float().flatten(0, 1)
        tokens = (y != -100).sum()
        if world > 1:
            dist.all_reduce(tokens)
        loss = F.cross_entropy(out, y.flatten(), ignore_index=-100, reduction="sum") * world / tokens
        if "mean of means" in words:
            loss = F.cross_entropy(out, y.flatten(), ignore_index=-100)
        if "constant" in words:
            loss = F.cross_entropy(out, y.flatten(), ignore_index=-100, reduction="sum") / 32
        if "statistic of the batch" in words and updates == 1:
            loss = loss + 4 * out.mean(0).square().sum()
        if "no gradient" in words:
            loss = loss * 0
        if "over world" in words:
            loss = loss / world
        if "gate twice" in words:
            loss = loss + world * 0.01 * model(x).square().mean((1, 2)).mean()
        (loss / window).backward()
        if number % window == 0:
            if "clipped" in words:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if "clipped alone" in words:
                norm = sum(p.grad.to_local().square().sum() for p in model.parameters()).sqrt()
                for p in model.parameters():
                    p.grad.mul_(0.1 / norm)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
            if "one update" in words:
                sys.exit(0)
            if updates == 4 and "writes" in words and rank == 0:
                torch.save(model.state_dict(), words[words.index("writes") + 1])
                sys.exit(0)
"""


def proved(
    place: Path,
    *words: str,
    options: Sequence[str] = ("--ranks", "2"),
    script: str = SCRIPT,
    warm: bool = True,
) -> tuple[int, dict[str, Any]]:
    """Run `danling prove` on the script in a directory, and return its exit code and what it reports.

    Its processes are forks that have torch loaded, unless they are not to be warm.
    """
    (place / "train.py").write_text(script)
    out = io.StringIO()
    paths = os.pathsep.join(filter(None, [os.fspath(ROOT), os.environ.get("PYTHONPATH")]))
    python = interpreter() if warm else sys.executable
    command = ["prove", "--json", "--timeout", "200", *options, "--", python, "train.py", *words]
    with (
        contextlib.chdir(place),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch.dict(os.environ, {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}),
    ):
        code = main(command)
    return code, json.loads(out.getvalue()) if out.getvalue() else {}
