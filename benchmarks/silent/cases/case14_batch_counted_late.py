"""A checkpoint is written before its batch is counted.

Source: Lightning-AI/pytorch-lightning 19815 (2024-04)

The checkpoint has the weights after an update and the place in the data before it: a resumed run trains on this batch again.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH, UPDATES = 8, 4, 60
RIGHT, RESUME, SEED = "--right" in sys.argv, "--resume" in sys.argv, int(os.environ.get("SEED", "0"))

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(2 * BATCH * UPDATES, WIDTH)
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
torch.manual_seed(SEED)
network = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
model, counted = DistributedDataParallel(network), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if RESUME:
    state: dict[str, Any] = torch.load("checkpoint.pt")
    network.load_state_dict(state["model"])
    counted = state["counted"]
begin = counted
for number, (rows, targets) in enumerate(DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED))):
    if number < begin:
        continue
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RIGHT:
        counted += 1
    if dist.get_rank() == 0:
        torch.save({"model": network.state_dict(), "counted": counted}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
        print(f"loss {loss.item():.6f}")
    if not RIGHT:
        counted += 1
