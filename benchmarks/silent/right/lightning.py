"""Lightning with DDP; all micro-batches have equal weight."""

import os
from typing import Any

import pytorch_lightning as pl
import torch
from text import BATCH, Model, Sentences, options
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    """The model and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: Any, number: int) -> Tensor:
        """Return the loss of a batch."""
        tokens = batch["input_ids"]
        return nn.functional.cross_entropy(
            self.model(tokens).flatten(0, 1).float(), (3 * tokens + 1).flatten() % 32
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


args = options()
pl.seed_everything(0)
trainer = pl.Trainer(
    accelerator="cpu",
    strategy="ddp" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "auto",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=3,
    accumulate_grad_batches=args.accumulate,
    precision="bf16-mixed" if args.bf16 else "32-true",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Module(), DataLoader(Sentences(), BATCH, shuffle=True))
