"""Accelerate where rank 0 reads all batches and divides them over the ranks; all batches have equal weight."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from text import BATCH, Model, Sentences, options
from torch import nn
from torch.utils.data import DataLoader

args = options()
set_seed(0)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=args.accumulate,
    mixed_precision="bf16" if args.bf16 else "no",
    dataloader_config=DataLoaderConfiguration(dispatch_batches=True),
)
model = Model()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Sentences(), BATCH)
)
for batch in loader:
    with accelerator.accumulate(model):
        tokens = batch["input_ids"]
        loss = nn.functional.cross_entropy(
            model(tokens).flatten(0, 1).float(), (3 * tokens + 1).flatten() % 32
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
