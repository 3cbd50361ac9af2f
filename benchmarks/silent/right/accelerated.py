"""Accelerate with DDP: tokens of all ranks and micro-batches counted before the window, as its documentation shows."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from text import BATCH, Model, Sentences, options, summed_loss
from torch.utils.data import DataLoader

args = options()
set_seed(0)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=args.accumulate,
    mixed_precision="bf16" if args.bf16 else "no",
)
model = Model()
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    DataLoader(Sentences(), BATCH, shuffle=True),
)
batches = iter(loader)
for _ in range(3):
    window = [next(batches) for _ in range(args.accumulate)]
    own = torch.stack([(batch["labels"] != -100).sum() for batch in window]).sum()
    count = accelerator.gather(own).sum()
    for number, batch in enumerate(window):
        accelerator.gradient_state._set_sync_gradients(number + 1 == len(window))
        context = accelerator.no_sync(model) if number + 1 < len(window) else torch.enable_grad()
        with context:
            loss = summed_loss(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss * accelerator.num_processes * args.accumulate / count)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
