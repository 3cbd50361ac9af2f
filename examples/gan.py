"""A GAN with two optimizers on the digits of scikit-learn, by overriding `train_step`.

python examples/gan.py                                    # 30 s of processor time
python examples/gan.py --auto_resume true --steps 8000    # goes on from there, both optimizers restored
torchrun --nproc-per-node 2 examples/gan.py --dataloader.batch_size 32

It prints the Fréchet distance between generated and real images, in pixels: 3.52 after 6000 steps, 44.76 untrained. Lower is
better. Both networks stand in one module, so that one forward and one backward serve both, also under DistributedDataParallel: the
discriminator's loss has a gradient for the discriminator only, the generator's for the generator only. `JointOptimizer` holds the two
optimizers, so that both are stepped, or skipped, saved and restored together.
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import danling as dl


class GAN(nn.Module):
    """A generator and a discriminator of 8 x 8 images, flat, in [-1, 1]."""

    def __init__(self, noise: int = 16, width: int = 128) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return generated images (B, 64) and the losses of discriminator and generator (https://arxiv.org/abs/1406.2661)."""
        fake = self.generator(torch.randn(len(real), self.noise, device=real.device))
        discriminator_loss = (
            softplus(-self.discriminator(real)).mean() + softplus(self.discriminator(fake.detach())).mean()
        )
        # The generator's loss must have no gradient for the discriminator, whose weights are therefore detached here.
        frozen = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        generator_loss = softplus(-functional_call(self.discriminator, frozen, (fake,))).mean()
        return fake, discriminator_loss, generator_loss


class GANRunner(dl.Runner):
    """Trains both networks at once."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images = torch.from_numpy(load_digits().data).float() / 8 - 1
        self.datasets = {"train": TensorDataset(images[:1500]), "val": TensorDataset(images[1500:])}
        self.model = GAN()
        self.optimizer = dl.optim.JointOptimizer(
            torch.optim.Adam(self.model.generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
            torch.optim.Adam(self.model.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        )

    def train_step(self, data: Any) -> tuple[Tensor, Tensor]:
        """Run one batch through both networks; the runner decides the update of both."""
        (real,) = data
        with self.train_context():
            with self.forward_context():
                fake, discriminator_loss, generator_loss = self.model(real)
                loss = discriminator_loss + generator_loss
            self.backward(loss)
        self.meters.update({"discriminator": discriminator_loss, "generator": generator_loss}, len(real))
        return fake, loss

    def evaluate_step(self, data: Any) -> tuple[None, None]:
        """Do nothing with a batch: the distance is one of whole sets."""
        return None, None

    def summarize(self, split: str, totals: Any) -> dict[str, float]:
        """Return the Fréchet distance of as many generated images as there are real ones."""
        real = self.datasets[split].tensors[0].to(self.device)
        gan = self.unwrapped_model
        # One stream for all ranks, so that the figure is the same on all of them.
        noise = torch.randn(len(real), 16, generator=torch.Generator().manual_seed(0)).to(self.device)
        return {"frechet_distance": frechet_distance(gan.get_submodule("generator")(noise), real)}


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the distance of two samples (N, D), each taken as a normal distribution (https://arxiv.org/abs/1706.08500)."""
    a, b = first.double(), second.double()
    between = torch.linalg.eigvals(a.T.cov() @ b.T.cov()).real.clamp_min(0).sqrt().sum()
    distance = (a.mean(0) - b.mean(0)).square().sum() + a.T.cov().trace() + b.T.cov().trace() - 2 * between
    return float(distance)


if __name__ == "__main__":
    config = dl.RunnerConfig(seed=1, lineage="gan", steps=6000, score_name="frechet_distance", evaluate_interval=1000)
    config.dataloader.batch_size = 64
    config.ema = {"enabled": True, "decay": 0.99}
    config.parse()
    with GANRunner(config) as runner:
        untrained = runner.evaluate("val")["val"]["frechet_distance"]
        runner.train()
        runner.print(f"Fréchet distance {runner.best_score:.2f} at step {runner.best_index}, {untrained:.2f} untrained")
