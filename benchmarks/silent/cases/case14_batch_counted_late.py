"""A checkpoint is written before its batch is counted.

Source: Lightning-AI/pytorch-lightning 19815 (2024-04)

The checkpoint has the weights after an update and the place in the data before it: a resumed run trains on this batch again.
"""

import torch
import torch.distributed as dist
from problems import RESUME, RIGHT, SEED, loader, network, regression, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, UPDATES = 4, 60

dist.init_process_group("gloo")
data = regression(2 * BATCH * UPDATES)
torch.manual_seed(SEED)
model, counted = DistributedDataParallel(network()), 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if RESUME:
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    counted = state["counted"]
begin = counted
for number, (rows, targets) in enumerate(loader(data, BATCH, SEED)):
    if number < begin:
        continue
    loss = nn.functional.mse_loss(model(rows), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RIGHT:
        counted += 1
    if dist.get_rank() == 0:
        save(model=model.state_dict(), counted=counted)
        print(f"loss {loss.item():.6f}")
    if not RIGHT:
        counted += 1
