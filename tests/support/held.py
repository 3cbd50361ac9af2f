"""What the parts of a torch runner ask of a runner, and nothing that a runner does by itself: they are tested alone on it.

held = Held(tmp_path, accum_steps=2)
held.parts.driver.begin_updates()
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from danling.config import RunnerConfig
from danling.data.run_data import RunData
from danling.distributed import LocalDomain, Placement
from danling.reporting import Reporter
from danling.runners.assembly import TorchParts
from danling.runners.state import RunnerState
from danling.training import LocalReduction, PassAgreement, Precision, TrainingSession, Window
from danling.training.keys import RandomKeys
from danling.training.preparation import ModelPreparation
from danling.training.saving import RunSaver

CPU = torch.device("cpu")


class Held:
    """What the parts ask of a runner, and nothing that a runner does by itself."""

    stack = "ddp"
    compilation = fault_tolerance = ema = scheduler = None
    is_main_process, distributed, world_size, rank, mode, seed = True, False, 1, 0, "train", 1
    is_step_mode, epochs, steps, batch_size, accum_steps = True, None, 4, 2, 1
    checkpoint_interval, log_interval = 2, 3
    train_splits: tuple[str, ...] = ("train",)
    evaluate_splits: tuple[str, ...] = ()

    def __init__(self, directory: Path, *own: str, **settings: Any) -> None:
        self.own = own
        self.config = RunnerConfig({"dataloader": {"batch_size": 2}, "steps": 4, **settings})
        self.device, self.world, self.state = CPU, LocalDomain(), RunnerState()
        self.placement = Placement.alike(self.world)
        self.model: Any = nn.Linear(1, 1, bias=False)
        self.criterion: Any = nn.MSELoss()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.datasets: dict[str, Any] = {}
        self.dataloaders: dict[str, Any] = {}
        self.meters: Any = None
        self.carry: Any = None
        self.preparation = ModelPreparation(self.world)
        self.precision, self.window = Precision(None, CPU), Window(self.world, CPU)
        self.workspace = SimpleNamespace(dir=directory)
        self.reduction = LocalReduction(self.optimizer, self.named_parameters)
        self._session = TrainingSession()
        self.observers = self._session.observers
        self._attributes = SimpleNamespace(before_training=lambda: None)
        self._keys = RandomKeys(self)  # type: ignore[arg-type]
        self._reporter = Reporter(is_main=True, world_size=1, seconds_between_lines=0)
        self._data = RunData(self)  # type: ignore[arg-type]
        self.sources = self._data.sources
        self.saved: list[dict[str, Any]] = []
        self.saver = RunSaver(manager=lambda: None, position=lambda: self.state.train, state=dict)  # type: ignore[arg-type, return-value]
        self._parts = self.parts = TorchParts(self)  # type: ignore[arg-type]
        self.results: dict[int, Any] = {}
        self.standing = SimpleNamespace(board=None, own=False)
        self.index = 0
        self.wrapped = 0

    def _overrides(self, hook: str) -> bool:
        return hook in self.own

    def _bind_reduction(self) -> None:
        self.wrapped += 1

    @property
    def unwrapped_model(self) -> nn.Module:
        bare: nn.Module = self.preparation.unwrap(self.model)
        return bare

    def _run_train_step(self, step: Any, data: Any) -> Any:
        return step(data)

    def named_parameters(self) -> Any:
        return self.model.named_parameters()

    def unwrap(self, model: Any) -> Any:
        return model

    def wrap_model(self, model: Any) -> Any:
        return model

    def build_agreement(self) -> PassAgreement:
        return PassAgreement(self.world, self.world)

    def to_device(self, data: Any) -> Any:
        return data

    def batch_weight(self, data: Any, target: Any) -> float:
        return float(len(data))

    def count_tokens(self, data: Any) -> float:
        return 0.0

    def train_step(self, data: Any) -> Any:
        loss = self.window.scale(self.model(data).mean())
        torch.autograd.backward(loss)
        return None, loss

    def save_checkpoint(self, **options: Any) -> None:
        self.saved.append(options)
