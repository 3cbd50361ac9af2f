"""Several optimizers in one `train_step`, against loops by hand: bitwise on one process, to 1e-12 in float64 over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import danling as dl


class GAN(nn.Module):
    """Two small networks; a batch norm, so that there are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def made(dtype: torch.dtype = torch.float64) -> tuple[GAN, list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(7)
    torch.manual_seed(5)
    data = [
        (torch.randn(n, 4, generator=generator).to(dtype), torch.randn(n, 3, generator=generator).to(dtype))
        for n in (6,) * 12
    ]
    return GAN().to(dtype), data


def optimizers(gan: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "discriminator": torch.optim.Adam(gan.discriminator.parameters(), lr=2e-2),
        "generator": torch.optim.Adam(gan.generator.parameters(), lr=1e-2),
    }


def schedules(optimizer: Any) -> dict[str, Any]:
    return {
        "discriminator": torch.optim.lr_scheduler.StepLR(optimizer["discriminator"], 2, 0.5),
        "generator": torch.optim.lr_scheduler.ExponentialLR(optimizer["generator"], 0.9),
    }


class Run(dl.Runner):
    """Alternating updates."""

    every = 1

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__({"log": False, "seed": 1, "dir": str(directory), "max_grad_norm": 0.5, "steps": 6, **settings})
        self.model, data = made()
        self.optimizer = optimizers(self.model)
        self.scheduler = schedules(self.optimizer)
        self.dataloaders = {"train": data}

    def train_step(self, data: Any) -> Any:
        real, noise = data
        gan = self.model
        with self.optimizing("discriminator"):
            fake = gan.generator(noise)
            self.backward(softplus(-gan.discriminator(real)).mean() + softplus(gan.discriminator(fake.detach())).mean())
        with self.optimizing("generator", every=self.every) as due:
            if due:
                self.backward(softplus(-gan.discriminator(fake)).mean())
        return None, None


def by_hand(steps: int, *, accumulate: int = 1, every: int = 1, clip: float = 0.5) -> GAN:
    """Train as people do: alternating updates, each with its norm."""
    gan, data = made()
    optimizer = optimizers(gan)
    schedule = schedules(optimizer)
    batches = iter(data)
    for step in range(1, steps + 1):
        kept: dict[str, list[Tensor]] = {}
        for micro in range(accumulate):
            real, noise = next(batches)
            fake = gan.generator(noise)
            losses = {
                "discriminator": lambda real=real, fake=fake: (
                    softplus(-gan.discriminator(real)).mean() + softplus(gan.discriminator(fake.detach())).mean()
                ),
                "generator": lambda fake=fake: softplus(-gan.discriminator(fake)).mean(),
            }
            for name, loss in losses.items():
                if name == "generator" and step % every:
                    continue
                mine = [p for group in optimizer[name].param_groups for p in group["params"]]
                found = torch.autograd.grad(loss(), mine, retain_graph=name == "discriminator")
                kept[name] = [a + b for a, b in zip(kept[name], found)] if name in kept else list(found)
                if micro == accumulate - 1:
                    for parameter, gradient in zip(mine, kept[name]):
                        parameter.grad = gradient / accumulate
                    nn.utils.clip_grad_norm_(mine, clip)
                    optimizer[name].step()
                    schedule[name].step()
                    optimizer[name].zero_grad()
    return gan


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("settings", "hand"),
    [
        ({}, {"steps": 6}),
        ({"steps": 4, "accum_steps": 2}, {"steps": 4, "accumulate": 2}),
        ({"every": 3}, {"steps": 6, "every": 3}),
    ],
    ids=["alternating", "accumulated", "every third"],
)
def test_phases_are_the_loop_by_hand_bit_for_bit(tmp_path: Path, settings: Any, hand: Any) -> None:
    settings = dict(settings)
    kind = type("Every", (Run,), {"every": settings.pop("every", 1)})
    with kind(tmp_path, **settings) as runner:
        runner.train()
        assert same(runner.model, by_hand(**hand))
        assert (
            runner.train_state.global_step == hand["steps"]
            and runner.train_state.samples == len(range(hand["steps"] * hand.get("accumulate", 1))) * 6
        )
        rates = [group["lr"] for group in runner.optimizer.param_groups]
        assert rates[0] == 2e-2 * 0.5 ** (hand["steps"] // 2)
        assert all(parameter.grad is None for parameter in runner.model.parameters())
