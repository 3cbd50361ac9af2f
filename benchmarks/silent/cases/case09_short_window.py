"""The last, shorter accumulation window of an epoch is divided by the length of a full one.

Source: modelscope/ms-swift 10084, Lightning-AI/pytorch-lightning 19987 (2024-06, 2026-09)

Three micro-batches an epoch in windows of two: the third is divided by two, so the update has half of the gradient of its samples.
"""

import torch
import torch.distributed as dist
from problems import CLASSES, RIGHT, SEED, classification, loader, network
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, BATCHES, WINDOW, EPOCHS = 8, 3, 2, 30

dist.init_process_group("gloo")
data = classification(2 * BATCH * BATCHES, SEED)
torch.manual_seed(SEED)
model = DistributedDataParallel(network(CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
batches = loader(data, BATCH, SEED)
for epoch in range(EPOCHS):
    batches.sampler.set_epoch(epoch)
    for number, (rows, targets) in enumerate(batches):
        first = number - number % WINDOW
        length = min(WINDOW, len(batches) - first) if RIGHT else WINDOW
        loss = nn.functional.cross_entropy(model(rows), targets)
        (loss / length).backward()
        if (number + 1) % WINDOW == 0 or number + 1 == len(batches):
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.6f}")
