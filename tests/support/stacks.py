"""Every stack as a row, a small runner that takes any of them, and what tests of DeepSpeed have in common.

Importing DeepSpeed takes seconds a process, so that a test runs several cases in the same processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.utils.tensors import whole

from .toys import whole_settings, whole_state

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed"
)
UNSAVED: dict[str, Any] = {"checkpoint.load_only": True}
"""For runs that nobody goes on with: an engine takes longer to save than to train so little."""


@dataclass(frozen=True)
class Stack:
    """How a stack is asked for on two processes, and how near its gradient comes to that of one."""

    settings: Mapping[str, Any]
    dtype: str = "float64"
    tolerance: float = 1e-12
    equals_ddp: bool = False
    package: str = "torch"

    @property
    def is_here(self) -> bool:
        return find_spec(self.package) is not None


STACKS: dict[str, Stack] = {
    "ddp": Stack({"stack": "ddp"}, equals_ddp=True),
    "parallel": Stack({"stack": "parallel", "parallel": {"axes": {"shard": 2}}}),
    "deepspeed": Stack(
        {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}}},
        dtype="float32",  # an engine keeps weights in float32
        tolerance=1e-5,
        package="deepspeed",
    ),
    "accelerate": Stack({"stack": "accelerate"}, equals_ddp=True, package="accelerate"),
    # The backend that runs the graph as it is: what inductor makes of it rounds otherwise, and takes long.
    "graph": Stack({"stack": "graph", "compile": {"backend": "eager"}}, equals_ddp=True),
}


class Points(Dataset[dict[str, Any]]):
    """Fixed points with three positions, of which some do not count, and their own numbers."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(4, (size, 3), generator=generator)
        # Unequal weights, and never nothing.
        self.targets[:, 1:][torch.rand(size, 2, generator=generator) < 0.5] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self.inputs[index], "target": self.targets[index], "index": index}


def build(dtype: torch.dtype, dropout: float = 0.0, *, norm: bool = False) -> nn.Module:
    """Return the model; seven do not divide over two ranks."""
    # No bias before the normalization: its gradient is nothing but rounding, which Adam would make steps of.
    first, between = nn.Linear(6, 7, bias=not norm), nn.BatchNorm1d(7) if norm else nn.Identity()
    return nn.Sequential(first, between, nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 12)).to(dtype)


class AnyStackRunner(dl.Runner):
    """Classifies three positions of a point on any stack, and writes down what its updates were made of."""

    not_saved: ClassVar[tuple[str, ...]] = ("trace",)

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        stop_at: int | None = None,
        spoiled: tuple[int, ...] = (),
        own: bool = False,
        norm: bool = True,
        frozen: bool = False,
        scaled: bool = False,
    ) -> None:
        super().__init__(config)
        self.stop_at, self.spoiled = stop_at, spoiled
        self.trace: list[tuple[float, float, float, float]] = []
        dtype = getattr(torch, self.config.get("arithmetic", "float32"))
        self.model = build(dtype, self.config.get("dropout", 0.1), norm=norm)
        self.model[0].requires_grad_(not frozen)
        if own:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.criterion = nn.CrossEntropyLoss()
        if scaled:
            self.criterion.scale = nn.Parameter(torch.ones(()))
        self.datasets = {
            "train": Points(self.config.get("points", 38), dtype),
            "val": Points(7, dtype),
        }

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        spoiled = self.rank == self.world_size - 1 and self.train_state.attempted in self.spoiled
        return super().train_step(
            (data["input"] * torch.nan if spoiled else data["input"], data["target"])
        )

    def evaluate_step(self, data: dict[str, Any]) -> tuple[Any, Tensor | None]:
        return super().evaluate_step((data["input"], data["target"]))

    def infer_step(self, data: dict[str, Any]) -> Any:
        return super().infer_step((data["input"], data["target"]))

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return super().compute_loss(pred.reshape(len(pred), 4, 3), target)

    def step(self) -> Any:
        if self.stop_at is not None and self.train_state.global_step == self.stop_at - 1:
            self.stop()
        rate = self.optimizer.param_groups[0]["lr"]
        outcome = super().step()
        assert outcome.grad_norm is not None
        self.trace.append(
            (float(outcome.loss_sum), float(outcome.weight), rate, float(outcome.grad_norm))
        )
        return outcome


def copied(value: Any) -> Any:
    """Return nested values with whole copies of the tensors. Call on all ranks."""
    if isinstance(value, Tensor):
        return whole(value).detach().clone()
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, (list, tuple)) else value


def settings(root: Path | str, stack: str = "deepspeed", **changes: Any) -> dict[str, Any]:
    """Return a configuration of ten updates on one process and six on two, where the last window of an epoch is a shorter one."""
    loader, schedule = {"batch_size": 4, "drop_last": False}, {"type": "cosine", "warmup_steps": 2}
    base = {
        "stack": stack,
        "epochs": 2,
        "max_grad_norm": 0.3,
        "dataloader": loader,
        "scheduler": schedule,
    }
    return whole_settings(root, **{**base, "ema": {}, "log": False, **changes})


def zero(stage: int, **changes: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **changes}}


def train(config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Train and return the trace, the figures and the whole state, less what says on which attempt it was reached."""
    with AnyStackRunner(config, **options) as runner:
        runner.train()
        return {
            "trace": runner.trace,
            "results": dict(runner.results),
            "state": copied(whole_state(runner)),
        }


def train_each(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Train one configuration after the other in this process."""
    return [train(config, **options) for config, options in cases]
