"""DDP with token weights over all micro-batches and ranks, or with a constant divisor; `no_sync`, clipping and a schedule."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from text import Model, options, summed_loss, windows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for window, count in windows(args.accumulate):
    divisor = 32 if args.constant else count / dist.get_world_size()
    for number, batch in enumerate(window):
        with nullcontext() if number + 1 == len(window) else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                logits = model(batch["input_ids"])
            (summed_loss(logits, batch["labels"]) / divisor).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
