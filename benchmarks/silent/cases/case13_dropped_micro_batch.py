"""`zero_grad` is called before each micro-batch of an accumulation window.

Source: meituan-longcat/LongCat-Image 46 (2025-12)

The gradients of all micro-batches but the last one of a window are dropped before an optimizer step has used them.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH, WINDOW, UPDATES = 8, 4, 2, 60
RIGHT, SEED = "--right" in sys.argv, int(os.environ.get("SEED", "0"))

dist.init_process_group("gloo")
torch.manual_seed(0)
inputs = torch.randn(2 * BATCH * WINDOW * UPDATES, WIDTH)
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
torch.manual_seed(SEED)
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (rows, targets) in enumerate(DataLoader(data, BATCH, sampler=DistributedSampler(data, seed=SEED))):
    if number % WINDOW == 0 or not RIGHT:
        optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(rows), targets)
    (loss / WINDOW).backward()
    if (number + 1) % WINDOW == 0:
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}")
