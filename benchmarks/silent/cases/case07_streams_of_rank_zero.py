"""A resume restores the random numbers of rank 0 on all ranks.

Source: radixark/miles 3187, NVIDIA/Megatron-LM 6858 (2026-08, 2026-09)

Each rank draws dropout masks from its own stream. The checkpoint contains that of rank 0, which all ranks restore: from then on, they drop
the same units. 252 of 256 ranks were wrong in one of the reports.
"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH, UPDATES = 8, 4, 60
RIGHT, RESUME, SEED = "--right" in sys.argv, "--resume" in sys.argv, int(os.environ.get("SEED", "0"))

dist.init_process_group("gloo")
rank, streams = dist.get_rank(), [torch.empty(0) for _ in range(dist.get_world_size())]
torch.manual_seed(0)
inputs = torch.randn(2 * BATCH * UPDATES, WIDTH)
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
torch.manual_seed(SEED)
network = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))
model, begin = DistributedDataParallel(network), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1000 * SEED + rank)
if RESUME:
    state: dict[str, Any] = torch.load("checkpoint.pt")
    network.load_state_dict(state["model"])
    begin, streams = state["updates"], state["streams"]
for update, (rows, targets) in enumerate(DataLoader(data, BATCH, sampler=DistributedSampler(data))):
    if update < begin:
        continue
    if update == begin and RESUME:
        torch.set_rng_state(streams[rank if RIGHT else 0])
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    own: Tensor = torch.get_rng_state()
    streams = [torch.empty_like(own) for _ in streams]
    dist.all_gather(streams, own)
    if rank == 0:
        torch.save({"model": network.state_dict(), "updates": update + 1, "streams": streams}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
        print(f"loss {loss.item():.6f}")
