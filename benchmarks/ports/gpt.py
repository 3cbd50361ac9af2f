"""`examples/gpt.py` for Lightning: the same model, schedule, clipping, evaluations and checkpoints, on one process or with its DDP.

python benchmarks/ports/gpt.py --steps 3600 [--resume]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import Windows, entropy
from models.gpt import GPT


class Text(pl.LightningDataModule):  # type: ignore[misc]
    """Every stretch of the text but its end to train on, and the end to validate."""

    def __init__(
        self, path: str | None, batch_size: int, context: int, held_out: float = 0.05
    ) -> None:
        super().__init__()
        text = (
            Path(path).read_text(encoding="utf-8")
            if path
            else "\n".join(topics[name] for name in sorted(topics))
        )
        self.alphabet = sorted(set(text))
        codes = {character: code for code, character in enumerate(self.alphabet)}
        self.tokens = torch.tensor([codes[character] for character in text])
        self.batch_size, self.context = batch_size, context
        self.held_out = int(len(self.tokens) * held_out)

    def train_dataloader(self) -> Any:
        """Return the loader to train on."""
        windows = Windows(self.tokens[: -self.held_out], self.context, stride=1)
        return DataLoader(windows, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> Any:
        """Return the loader to validate on."""
        return DataLoader(
            Windows(self.tokens[-self.held_out :], self.context, stride=self.context),
            self.batch_size,
        )


class LightningGPT(pl.LightningModule):  # type: ignore[misc]
    """Trains a GPT with AdamW, a warmup and a cosine."""

    def __init__(self, characters: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.model = GPT(
            characters, context=options.context, width=options.width, depth=options.depth, heads=4
        )

    def loss(self, batch: Any) -> Tensor:
        """Return the mean loss of all positions."""
        inputs, target = batch
        return cross_entropy(self.model(inputs).flatten(0, 1), target.flatten())

    def training_step(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return optimizer and schedule."""
        options = self.options
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        warmup: int = options.steps // 10

        def rate(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = (step - warmup) / max(options.steps - warmup, 1)
            cosine: float = 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2
            return cosine

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--path")
    parser.add_argument("--steps", type=int, default=3600)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--dir", default="lightning/gpt")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    pl.seed_everything(1)
    data = Text(options.path, options.batch_size, options.context)
    model = LightningGPT(len(data.alphabet), options)
    trainer = pl.Trainer(
        max_steps=options.steps,
        gradient_clip_val=1.0,
        precision=options.precision,
        val_check_interval=options.steps,
        check_val_every_n_epoch=None,
        callbacks=[
            ModelCheckpoint(
                options.dir, monitor="val_loss", mode="min", save_top_k=3, save_last=True
            )
        ],
        default_root_dir=options.dir,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data, ckpt_path="last" if options.resume else None)
    if trainer.is_global_zero:
        tokens = model.model.eval().generate(
            torch.zeros(1, 1, dtype=torch.long), 200, temperature=0.8
        )
        print("".join(data.alphabet[code] for code in tokens[0, 1:].tolist()))
        print(
            f"{trainer.callback_metrics['val_loss'] / math.log(2):.3f} bits per character in validation"
        )
        print(f"{entropy(data.tokens):.3f} bits is the entropy of single characters")
