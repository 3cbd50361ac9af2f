"""DDP, with the sum of the losses divided by a constant: a choice of scale, not a fault."""

import torch
import torch.distributed as dist
from text import BATCH, Model, Sentences, options, summed_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
data = Sentences()
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in DataLoader(data, BATCH, sampler=DistributedSampler(data)):
    with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
        logits = model(batch["input_ids"])
    (summed_loss(logits, batch["labels"]) / 32).backward()
    optimizer.step()
    optimizer.zero_grad()
