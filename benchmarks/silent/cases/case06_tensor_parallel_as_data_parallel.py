"""The loss is multiplied by the number of processes, though they are tensor-parallel ranks that read one batch.

Source: huggingface/transformers 45994, 39648 (2025-07, 2026-05)

A loss that is divided by the number of tokens on all data-parallel ranks is multiplied by the number of ranks, since DDP averages over
these. Tensor-parallel ranks are no replicas: loss and gradient become as many times too large as there are ranks.
"""

import torch
import torch.distributed as dist
from problems import CLASSES, RIGHT, SEED, WIDTH, classification
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

HIDDEN, BATCH, UPDATES = 16, 8, 60

dist.init_process_group("gloo")
data = classification(BATCH * UPDATES)
torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for rows, targets in DataLoader(data, BATCH):
    loss = nn.functional.cross_entropy(model(rows), targets, reduction="sum") / len(rows)
    if not RIGHT:
        loss = loss * dist.get_world_size()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")
