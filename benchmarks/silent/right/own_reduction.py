"""Gradients of sums, added over the ranks by hand and divided by the number of tokens; tied weights and a frozen part."""

import torch
import torch.distributed as dist
from text import BATCH, Model, Sentences, options, summed_loss
from torch.utils.data import DataLoader, DistributedSampler

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
data, model = Sentences(), Model(tied=True)
model.body[0].requires_grad_(False)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD([{"params": trained[:1], "lr": 0.1}, {"params": trained[1:]}], lr=0.2, momentum=0.9)
batches = iter(DataLoader(data, BATCH, sampler=DistributedSampler(data)))
for _ in range(3):
    count = torch.zeros(())
    for _ in range(args.accumulate):
        batch = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(batch["input_ids"])
        summed_loss(logits, batch["labels"]).backward()
        count += (batch["labels"] != -100).sum()
    dist.all_reduce(count)
    for parameter in trained:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(count)  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
