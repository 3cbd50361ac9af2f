"""`examples/gan.py` for Lightning: the same updates, averaged weights, evaluations and checkpoints, with manual optimization.

python benchmarks/ports/gan.py --steps 6000 [--resume]

Lightning does not weigh losses over micro-batches or ranks here, nor clip or skip an update for each optimizer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gan import GAN, frechet_distance


class LightningGAN(pl.LightningModule):  # type: ignore[misc]
    """Updates the discriminator, then the generator."""

    def __init__(self, real: Tensor) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gan = GAN()
        self.real = real

    def configure_optimizers(self) -> Any:
        """Return one optimizer of each network."""
        discriminator = torch.optim.Adam(
            self.gan.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)
        )
        generator = torch.optim.Adam(self.gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
        return [discriminator, generator], []

    def training_step(self, batch: Any) -> None:
        """Update both networks with one batch."""
        (real,) = batch
        gan = self.gan
        discriminator, generator = self.optimizers()
        fake = gan.generator(torch.randn(len(real), gan.noise, device=self.device))
        self.toggle_optimizer(discriminator)
        loss = (
            softplus(-gan.discriminator(real)).mean()
            + softplus(gan.discriminator(fake.detach())).mean()
        )
        discriminator.zero_grad()
        self.manual_backward(loss)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.log("discriminator_loss", loss)
        self.toggle_optimizer(generator)
        loss = softplus(-gan.discriminator(fake)).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log("generator_loss", loss)

    def validation_step(self, batch: Any) -> None:
        """Do nothing with a batch: the distance is one of whole sets."""

    def on_validation_epoch_end(self) -> None:
        """Log the Fréchet distance of as many generated images as there are real ones."""
        real = self.real.to(self.device)
        noise = torch.randn(len(real), 16, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )
        self.log("frechet_distance", frechet_distance(self.gan.generator(noise), real))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dir", default="lightning/gan")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    pl.seed_everything(1)
    images = torch.from_numpy(load_digits().data).float() / 8 - 1
    train = DataLoader(
        TensorDataset(images[:1500]), options.batch_size, shuffle=True, drop_last=True
    )
    val = DataLoader(TensorDataset(images[1500:]), options.batch_size)
    best = ModelCheckpoint(options.dir, monitor="frechet_distance", mode="min", save_last=True)
    trainer = pl.Trainer(
        max_steps=2 * options.steps,  # each optimizer counts
        val_check_interval=min(1000, options.steps),
        check_val_every_n_epoch=None,
        callbacks=[best, EMAWeightAveraging(decay=0.99)],
        default_root_dir=options.dir,
        logger=False,
        enable_progress_bar=False,
    )
    model = LightningGAN(images[1500:])
    (untrained,) = trainer.validate(model, val, verbose=False)
    trainer.fit(model, train, val, ckpt_path="last" if options.resume else None)
    print(
        f"Fréchet distance {best.best_model_score:.2f}, {untrained['frechet_distance']:.2f} untrained"
    )
