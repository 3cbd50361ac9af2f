"""A script as Accelerate's documentation shows it: checkpoints within an epoch, and a resume by `skip_first_batches`.

With Accelerate 1.15.0 a resume in a later epoch than the first reads the rest of this epoch in the order of epoch 0
(huggingface/accelerate 2016, 4071). `--right` also sets the epoch on the loader that skips.
"""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, EPOCHS, EVERY = 8, 4, 6, 3
RIGHT, RESUME = "--right" in sys.argv, "--resume" in sys.argv

set_seed(0)
configuration = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=configuration)
inputs = torch.randn(64, WIDTH)
data = TensorDataset(inputs, inputs.abs().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(data, BATCH, shuffle=True)
)
first, skipped, updates = 0, 0, 0
if RESUME:
    place = max(Path("checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    accelerator.load_state(str(place))
    updates = int(place.name[5:])
    first, skipped = divmod(updates, len(loader))
for epoch in range(first, EPOCHS):
    active = loader
    if epoch == first and skipped:
        active = accelerator.skip_first_batches(loader, skipped)
        if RIGHT:
            active.set_epoch(epoch)
    if RIGHT:
        loader.set_epoch(epoch)
    for rows, targets in active:
        loss = nn.functional.mse_loss(model(rows), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates % EVERY == 0:
            accelerator.save_state("unfinished")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                os.makedirs("checkpoints", exist_ok=True)
                os.replace("unfinished", f"checkpoints/step_{updates}")
            accelerator.wait_for_everyone()
