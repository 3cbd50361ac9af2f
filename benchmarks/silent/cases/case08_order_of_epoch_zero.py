"""A resume in a later epoch reads the samples in the order of epoch 0.

Source: huggingface/accelerate 2016, 4071, modelscope/ms-swift 10050, huggingface/transformers 40691 (2023-10 to 2026-09)

The loader that skips the batches of the interrupted epoch is a new one, and the epoch is set on the old one. So the rest of this epoch has
the order of epoch 0: some samples are read twice, others not at all.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH, BATCHES, EPOCHS = 8, 4, 6, 10
RIGHT, RESUME, SEED = "--right" in sys.argv, "--resume" in sys.argv, int(os.environ.get("SEED", "0"))

dist.init_process_group("gloo")
torch.manual_seed(SEED)
inputs = torch.randn(2 * BATCH * BATCHES, WIDTH)
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
network = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
model, first, skipped = DistributedDataParallel(network), 0, 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if RESUME:
    state: dict[str, Any] = torch.load("checkpoint.pt")
    network.load_state_dict(state["model"])
    first, skipped = divmod(state["updates"], BATCHES)
loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED))
for epoch in range(first, EPOCHS):
    loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    rest, begin = loader, 0
    if epoch == first and skipped:
        rest, begin = DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED)), skipped
        if RIGHT:
            rest.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    for batch, (rows, targets) in enumerate(rest):
        if batch < begin:
            continue
        loss = nn.functional.mse_loss(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": network.state_dict(), "updates": epoch * BATCHES + batch + 1}, "checkpoint.tmp")
            os.replace("checkpoint.tmp", "checkpoint.pt")
            print(f"loss {loss.item():.6f}")
