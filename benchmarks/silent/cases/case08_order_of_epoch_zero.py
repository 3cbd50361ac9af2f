"""A resume in a later epoch reads the samples in the order of epoch 0.

Source: huggingface/accelerate 2016, 4071, modelscope/ms-swift 10050, huggingface/transformers 40691 (2023-10 to 2026-09)

The loader that skips the batches of the interrupted epoch is a new one, and the epoch is set on the old one. So the rest of this epoch has
the order of epoch 0: some samples are read twice, others not at all.
"""

import torch
import torch.distributed as dist
from problems import RESUME, RIGHT, SEED, loader, network, regression, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, BATCHES, EPOCHS = 4, 6, 10

dist.init_process_group("gloo")
data = regression(2 * BATCH * BATCHES, SEED)
torch.manual_seed(SEED)
model, first, skipped = DistributedDataParallel(network()), 0, 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
if RESUME:
    state = torch.load("checkpoint.pt")
    model.load_state_dict(state["model"])
    first, skipped = divmod(state["updates"], BATCHES)
batches = loader(data, BATCH, SEED)
for epoch in range(first, EPOCHS):
    batches.sampler.set_epoch(epoch)
    rest, begin = batches, 0
    if epoch == first and skipped:
        rest, begin = loader(data, BATCH, SEED), skipped
        if RIGHT:
            rest.sampler.set_epoch(epoch)
    for batch, (rows, targets) in enumerate(rest):
        if batch < begin:
            continue
        loss = nn.functional.mse_loss(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            save(model=model.state_dict(), updates=epoch * BATCHES + batch + 1)
            print(f"loss {loss.item():.6f}")
