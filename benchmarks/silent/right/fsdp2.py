"""FSDP2 with accumulation, mixed precision and torch's clipping."""

import torch
import torch.distributed as dist
from text import BATCH, Model, Sentences, options, summed_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
data, model = Sentences(), Model()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
for layer in (model.embed, model.body[0], model.body[3], model):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = iter(DataLoader(data, BATCH, sampler=DistributedSampler(data)))
for _ in range(3):
    window = [next(batches) for _ in range(args.accumulate)]
    count = torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum()
    dist.all_reduce(count)
    for number, batch in enumerate(window):
        model.set_requires_gradient_sync(number + 1 == len(window))  # type: ignore[operator]
        loss = summed_loss(model(batch["input_ids"]), batch["labels"])
        (loss * dist.get_world_size() / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
