"""A resume restores the random numbers of rank 0 on all ranks.

Source: radixark/miles 3187, NVIDIA/Megatron-LM 6858 (2026-08, 2026-09)

Each rank draws dropout masks from its own stream. The checkpoint contains that of rank 0, which all ranks restore: from then on, they drop
the same units. 252 of 256 ranks were wrong in one of the reports.
"""

import torch
import torch.distributed as dist
from problems import RESUME, RIGHT, SEED, WIDTH, loader, regression, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BATCH, UPDATES = 4, 60

dist.init_process_group("gloo")
rank, streams = dist.get_rank(), [torch.empty(0) for _ in range(dist.get_world_size())]
data = regression(2 * BATCH * UPDATES)
torch.manual_seed(SEED)
network = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))
model, begin = DistributedDataParallel(network), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
torch.manual_seed(1000 * SEED + rank)
if RESUME:
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    begin, streams = state["updates"], state["streams"]
for update, (rows, targets) in enumerate(loader(data, BATCH)):
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
        save(model=model.state_dict(), updates=update + 1, streams=streams)
        print(f"loss {loss.item():.6f}")
