"""FSDP2 with accumulation, mixed precision and torch's clipping."""

import torch
import torch.distributed as dist
from text import Model, options, summed_loss, windows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
policy = (
    MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
)
for layer in (model.embed, model.body[0], model.body[3], model):
    fully_shard(layer, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for window, count in windows(args.accumulate):
    for number, batch in enumerate(window):
        model.set_requires_gradient_sync(number + 1 == len(window))
        loss = summed_loss(model(batch["input_ids"]), batch["labels"])
        (loss * dist.get_world_size() / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
