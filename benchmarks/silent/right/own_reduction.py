"""Gradients of sums, added over the ranks by hand and divided by the number of tokens; tied weights and a frozen part."""

import torch
import torch.distributed as dist
from text import Model, options, summed_loss, windows

args = options()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = Model(tied=True)
model.body[0].requires_grad_(False)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(
    [{"params": trained[:1], "lr": 0.1}, {"params": trained[1:]}], lr=0.2, momentum=0.9
)
for window, count in windows(args.accumulate):
    for batch in window:
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(batch["input_ids"])
        summed_loss(logits, batch["labels"]).backward()
    for parameter in trained:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(count)
    optimizer.step()
    optimizer.zero_grad()
