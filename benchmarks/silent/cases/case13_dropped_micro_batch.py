"""`zero_grad` is called before each micro-batch of an accumulation window.

Source: meituan-longcat/LongCat-Image 46 (2025-12)

The gradients of all micro-batches but the last one of a window are dropped before an optimizer step has used them.
"""

import torch
import torch.distributed as dist
from problems import RIGHT, SEED, loader, network, regression
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, WINDOW, UPDATES = 4, 2, 60

dist.init_process_group("gloo")
data = regression(2 * BATCH * WINDOW * UPDATES)
torch.manual_seed(SEED)
model = DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (rows, targets) in enumerate(loader(data, BATCH, SEED)):
    if number % WINDOW == 0 or not RIGHT:
        optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(rows), targets)
    (loss / WINDOW).backward()
    if (number + 1) % WINDOW == 0:
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}")
