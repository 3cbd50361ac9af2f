"""Parameter groups that are added within a run, and optimizers that compute their rate themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

EPOCHS, UPDATES = 4, 4
RATE, OWN = 0.1, 0.04


class Unfreezing(dl.TorchRunner):
    """Trains the head, and from the third epoch on the rest at a rate of its own."""

    not_saved = ("rates",)

    def __init__(self, config: dict[str, Any], schedule: Any = None) -> None:
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
        self.model[0].requires_grad_(False)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model[2].parameters(), lr=RATE)
        if schedule is not None:
            self.scheduler = schedule(self.optimizer)
        self.datasets = {"train": TensorDataset(torch.randn(16, 2), torch.arange(16) % 3)}
        self.rates: list[list[float]] = []

    def train_epoch(self, split: str = "train") -> Any:
        if self.state.train.epoch == 2:
            rest = self.unwrapped_model[0].requires_grad_(True)  # type: ignore[index]
            self.optimizer.add_param_group({"params": list(rest.parameters()), "lr": OWN})
        return super().train_epoch(split)

    def train_step(self, data: Any) -> Any:
        self.rates.append([group["lr"] for group in self.optimizer.param_groups])
        return super().train_step(data)


def train(root: Path, schedule: Any = None, **changes: Any) -> Any:
    world = 1
    config = {"seed": 1, "epochs": EPOCHS, "dir": str(root), "log": False, **changes}
    config["dataloader"] = {"global_batch_size": 16 // UPDATES * world}
    with Unfreezing(config, schedule) as runner:
        runner.train()
        return runner.rates


@pytest.mark.parametrize("world_size", [1, 2])
def test_built_schedule_takes_an_added_group_from_its_own_rate(
    tmp_path: Path, world_size: int
) -> None:
    for rates in run_processes(
        train,
        tmp_path,
        scheduler={"type": "cosine"},
        ddp={"find_unused_parameters": True},
        world_size=world_size,
    ):
        updates = EPOCHS * UPDATES
        for update, found in enumerate(rates):
            factor = 0.5 * (1 + math.cos(math.pi * update / updates))
            # The first update with the group comes before the schedule has seen it.
            own = (
                [OWN * (1.0 if update == updates // 2 else factor)]
                if update >= updates // 2
                else []
            )
            assert found == pytest.approx([RATE * factor, *own])


def test_added_group_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, scheduler={"type": "cosine"})
    assert (
        sum(
            "1 parameter group was added to the optimizer since the training began" in m
            for m in caplog.messages
        )
        == 1
    )


SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lambda": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)), {}),
    "lambda by epoch": (
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
        {"scheduler": {"interval": "epoch"}},
    ),
    "one cycle": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=99), {}),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedule_unable_to_take_an_added_group_is_an_error_with_the_fix(
    tmp_path: Path, kind: str
) -> None:
    schedule, changes = SCHEDULES[kind]
    with pytest.raises(
        ValueError,
        match="move the rates of all 2 groups of the optimizer. Received: a .* made for 1,",
    ):
        train(tmp_path, schedule, **changes)


class OwnRate(torch.optim.SGD):
    """Computes its rate itself, and says so by None, as Adafactor does."""

    def __init__(self, parameters: Any, shown: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.hide(shown)

    def hide(self, shown: bool) -> None:
        for group in self.param_groups:
            group["lr"] = None
            if not shown:
                del group["lr"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= 0.1 * parameter.grad


def train_with_own_rate(root: Path, shown: bool) -> list[str]:
    messages: list[str] = []

    class Own(Unfreezing):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.optimizer = OwnRate(self.model[2].parameters(), shown)

        def train_epoch(self, split: str = "train") -> Any:
            return dl.TorchRunner.train_epoch(self, split)

        def train_step(self, data: Any) -> Any:
            return dl.TorchRunner.train_step(self, data)

    for epochs in (1, 2):
        config = {
            "seed": 1,
            "epochs": epochs,
            "dir": str(root),
            "auto_resume": True,
            "log_interval": 1,
        }
        with Own({**config, "log": True, "dataloader": {"batch_size": 4}}) as runner:
            runner.train()
    for log in sorted((root / "logs").glob("*.log")):
        messages += log.read_text().splitlines()
    return messages


@pytest.mark.parametrize("shown", [True, False])
def test_optimizer_without_a_rate_is_trained_logged_and_resumed(
    tmp_path: Path, shown: bool
) -> None:
    lines = train_with_own_rate(tmp_path, shown)
    assert not any("failed with" in line or "is dropped" in line for line in lines)
    assert any("loss" in line for line in lines) and not any(" lr " in line for line in lines)
    assert any("Resumed from" in line for line in lines)


def test_adafactor_of_transformers_is_trained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.optimization import Adafactor

    class Adaptive(Unfreezing):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.optimizer = Adafactor(self.model[2].parameters())

        def train_epoch(self, split: str = "train") -> Any:
            return dl.TorchRunner.train_epoch(self, split)

    with Adaptive({"steps": 3, "dir": str(tmp_path), "log": False, "log_interval": 1}) as runner:
        before = runner.unwrapped_model[2].weight.clone()
        runner.train()
        assert not torch.equal(before, runner.unwrapped_model[2].weight)
