"""The last, shorter accumulation window of an epoch is divided by the length of a full one.

Source: modelscope/ms-swift 10084, Lightning-AI/pytorch-lightning 19987 (2024-06, 2026-09)

Three micro-batches an epoch in windows of two: the third is divided by two, so the update has half of the gradient of its samples.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, CLASSES, BATCH, BATCHES, WINDOW, EPOCHS = 8, 4, 8, 3, 2, 30
RIGHT, SEED = "--right" in sys.argv, int(os.environ.get("SEED", "0"))

dist.init_process_group("gloo")
torch.manual_seed(SEED)
inputs = torch.randn(2 * BATCH * BATCHES, WIDTH)
data = TensorDataset(inputs, (inputs.abs() @ torch.randn(WIDTH, CLASSES)).argmax(1))
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
sampler = DistributedSampler(data, seed=SEED)
loader = DataLoader(data, BATCH, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for number, (rows, targets) in enumerate(loader):
        first = number - number % WINDOW
        length = min(WINDOW, len(loader) - first) if RIGHT else WINDOW
        loss = nn.functional.cross_entropy(model(rows), targets)
        (loss / length).backward()
        if (number + 1) % WINDOW == 0 or number + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"loss {loss.item():.6f}")
