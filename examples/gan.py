"""A GAN with two optimizers on the digits of scikit-learn, by overriding `train_step`.

python examples/gan.py                                    # 50 s of processor time
python examples/gan.py --auto_resume true --steps 8000    # goes on from there, both optimizers restored
torchrun --nproc-per-node 2 examples/gan.py --dataloader.batch_size 32

It prints the Fréchet distance between generated and real images, in pixels: 2.41 after 6000 steps, 44.76 untrained. In each step the
discriminator is updated first, and then the generator against the new discriminator, as in the usual loop. Each of them has an optimizer
with a name, and `with self.optimizing(name)` makes its update: weighed over micro-batches and ranks, clipped by its own norm, saved and
restored.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import danling as dl


class GAN(nn.Module):
    """A generator and a discriminator of 8 x 8 images, flat, in [-1, 1]."""

    def __init__(self, noise: int = 16, width: int = 128) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 64),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )


class GANRunner(dl.Runner):
    """Updates the discriminator, then the generator (https://arxiv.org/abs/1406.2661)."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images = torch.from_numpy(load_digits().data).float() / 8 - 1
        self.datasets = {"train": TensorDataset(images[:1500]), "val": TensorDataset(images[1500:])}
        self.model = GAN()
        self.optimizer = {
            "discriminator": torch.optim.Adam(
                self.model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)
            ),
            "generator": torch.optim.Adam(
                self.model.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)
            ),
        }

    def train_step(self, data: Any) -> tuple[Tensor, None]:
        """Update both networks with one batch."""
        (real,) = data
        gan: Any = self.model
        with self.optimizing("discriminator"):
            with self.forward_context():
                fake = gan.generator(torch.randn(len(real), gan.noise, device=real.device))
                loss = (
                    softplus(-gan.discriminator(real)).mean()
                    + softplus(gan.discriminator(fake.detach())).mean()
                )
            self.backward(loss)
        with self.optimizing("generator"):
            with self.forward_context():
                loss = softplus(-gan.discriminator(fake)).mean()
            self.backward(loss)
        return fake, None

    def evaluate_step(self, data: Any) -> tuple[None, None]:
        """Do nothing with a batch: the distance is one of whole sets."""
        return None, None

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        """Return the Fréchet distance of as many generated images as there are real ones."""
        real = self.datasets[split].tensors[0].to(self.device)
        gan = self.unwrapped_model
        # One stream for all ranks, so that the figure is the same on all of them.
        noise = torch.randn(len(real), 16, generator=torch.Generator().manual_seed(0)).to(
            self.device
        )
        return {"frechet_distance": frechet_distance(gan.get_submodule("generator")(noise), real)}


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the distance of two samples (N, D), each taken as a normal distribution (https://arxiv.org/abs/1706.08500)."""
    a, b = first.double(), second.double()
    between = torch.linalg.eigvals(a.T.cov() @ b.T.cov()).real.clamp_min(0).sqrt().sum()
    distance = (
        (a.mean(0) - b.mean(0)).square().sum() + a.T.cov().trace() + b.T.cov().trace() - 2 * between
    )
    return float(distance.detach())


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="gan", steps=6000, score_name="frechet_distance", evaluate_interval=1000
    )
    config.dataloader.batch_size = 64
    config.ema = {"enabled": True, "decay": 0.99}
    config.parse()
    with GANRunner(config) as runner:
        untrained = runner.evaluate("val")["val"]["frechet_distance"]
        runner.train()
        runner.print(
            f"Fréchet distance {runner.best_score:.2f} at step {runner.best_index}, {untrained:.2f} untrained"
        )
