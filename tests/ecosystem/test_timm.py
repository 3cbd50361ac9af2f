"""timm: its schedulers are told where the run stands, and Mixup is keyed by batch. Skipped where timm and torchvision are not installed.

Library: timm
Works: its schedulers by epoch and by update, `Mixup` in a `collate_fn`
Exact: learning rates; mixed samples on resume, with any number of workers
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.seen import Seeing, assert_goes_on_alike
from support.toys import settings
from support.vision import import_or_skip
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

import danling as dl

import_or_skip("timm")

from timm.data import Mixup  # noqa: E402
from timm.scheduler import CosineLRScheduler, PlateauLRScheduler, StepLRScheduler  # noqa: E402


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 1, 4, 4, generator=generator), torch.arange(24) % 3)


class Mixed:
    def __init__(self) -> None:
        self.mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=3)

    def __call__(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        return self.mixup(*default_collate(samples))


class Timm(dl.Runner):
    not_saved = ("rates",)

    def __init__(self, config: dict[str, Any], scheduler: Any) -> None:
        super().__init__(config)
        self.model, self.criterion = (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
            nn.CrossEntropyLoss(),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.datasets = {"train": images()}
        self.scheduler = scheduler(self.optimizer)
        self.rates: list[float] = []

    def optimizer_step(self) -> None:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        super().optimizer_step()


SCHEDULERS = {
    "epochs": lambda optimizer: CosineLRScheduler(
        optimizer, t_initial=5, warmup_t=2, warmup_lr_init=0.01
    ),
    "updates": lambda optimizer: CosineLRScheduler(
        optimizer, t_initial=30, warmup_t=4, warmup_lr_init=0.01, t_in_epochs=False
    ),
    "steps": lambda optimizer: StepLRScheduler(optimizer, decay_t=2, decay_rate=0.5),
}


def by_hand(kind: str) -> list[float]:
    """The rates of timm's own training loop, over 5 epochs of 6 updates."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, rates, updates = SCHEDULERS[kind](optimizer), [], 0
    for epoch in range(5):
        for _ in range(6):
            rates.append(optimizer.param_groups[0]["lr"])
            updates += 1
            scheduler.step_update(num_updates=updates)
        scheduler.step(epoch + 1)
    return rates


@pytest.mark.parametrize("kind", sorted(SCHEDULERS))
@pytest.mark.parametrize("mode", ["epochs", "steps"])
def test_rates_are_those_of_its_own_loop(kind: str, mode: str, tmp_path: Path) -> None:
    expected, rates = by_hand(kind), []
    assert len(set(expected)) > 2
    for part in (2, 5):
        with Timm(
            settings(
                tmp_path,
                auto_resume=True,
                optim={},
                **{mode: part if mode == "epochs" else 6 * part - 1},
            ),
            SCHEDULERS[kind],
        ) as runner:
            runner.train()
            rates += runner.rates
    assert rates == expected[: len(rates)] and len(rates) >= 29


def test_an_interval_in_another_unit_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ValueError,
            match=r"Expected scheduler.interval='epoch', in which the CosineLRScheduler counts",
        ),
        Timm(
            settings(
                tmp_path, epochs=1, optim={}, scheduler={"type": "cosine", "interval": "step"}
            ),
            SCHEDULERS["epochs"],
        ) as runner,
    ):
        runner.train()


@pytest.mark.filterwarnings("ignore:PlateauLRScheduler is deprecated:FutureWarning")
def test_its_schedule_by_a_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a PlateauLRScheduler.*Take torch.optim.lr_scheduler.ReduceLROnPlateau"
    ):
        Timm(settings(tmp_path, epochs=1, optim={}), PlateauLRScheduler)


class Mixing(Seeing):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
            nn.CrossEntropyLoss(),
        )
        self.datasets = {"train": images()}
        self.config.dataloader.collate_fn = Mixed()

    def values(self, data: Any) -> list[Tensor]:
        return [data[0].clone(), data[1].clone()]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_samples_are_those_of_the_uninterrupted_run(workers: int, tmp_path: Path) -> None:
    assert_goes_on_alike(Mixing, tmp_path, workers=workers)
