"""DDP with token weights over all micro-batches and ranks, `no_sync`, clipping and a schedule."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from text import BATCH, Model, Sentences, options, summed_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
data = Sentences()
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
batches = iter(DataLoader(data, BATCH, sampler=DistributedSampler(data)))
for _ in range(3):
    window = [next(batches) for _ in range(args.accumulate)]
    count = torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum()
    dist.all_reduce(count)
    for number, batch in enumerate(window):
        with nullcontext() if number + 1 == len(window) else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                logits = model(batch["input_ids"])
            (summed_loss(logits, batch["labels"]) * dist.get_world_size() / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
