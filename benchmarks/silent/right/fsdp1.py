"""FSDP1, with its own clipping."""

import torch
import torch.distributed as dist
from text import BATCH, Model, Sentences, options, summed_loss
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
data = Sentences()
model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
    count = (batch["labels"] != -100).sum()
    dist.all_reduce(count)
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        logits = model(batch["input_ids"])
    (summed_loss(logits, batch["labels"]) * dist.get_world_size() / count).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
