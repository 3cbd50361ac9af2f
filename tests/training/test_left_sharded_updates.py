"""An update that an exception has left half-way, where FSDP2 or the canonical sum keeps something of it, which is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.data import TensorDataset

import danling as dl
from danling.utils.tensors import whole

INPUTS = torch.linspace(-1.0, 1.0, 128, dtype=torch.float64).reshape(32, 4)
TARGETS = INPUTS.sin()[:, :2].roll(1, 0)
UPDATES = 4


def fail_nowhere(where: str) -> None:
    """Do nothing."""


class Layer(nn.Module):
    """A block of its own to FSDP2, which calls `fail` in its forward, and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fail: Callable[[str], None] = fail_nowhere

    def forward(self, inputs: Tensor) -> Tensor:
        self.fail("in forward")
        outputs: Tensor = inputs + self.linear(inputs).tanh()
        if outputs.requires_grad:
            outputs.register_hook(lambda _: self.fail("in backward"))  # type: ignore[no-untyped-call]
        return outputs


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), Layer(), Layer(), nn.Linear(8, 2)).double()


class Failing(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = make(), nn.MSELoss()
        self.datasets = {
            "train": TensorDataset(INPUTS, TARGETS),
            "val": TensorDataset(INPUTS[:8], TARGETS[:8]),
        }
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.left = [self.config.fails]
        for layer in self.model.children():
            if isinstance(layer, Layer):
                layer.fail = self.fail

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        self.fail("before backward")
        return super().compute_loss(pred, target)

    def train_step(self, data: Any) -> Any:
        returned = super().train_step(data)
        self.fail("after backward")
        return returned

    def fail(self, where: str) -> None:
        # The canonical sum counts the micro-batches of all ranks.
        begin = 4 if self.config.gradient_sum == "canonical" else 2
        micro_batch = begin if where == "after backward" else begin + 1
        if self.left == [where] and self.train_state.micro_step == micro_batch:
            self.left.clear()
            raise RuntimeError("a bad sample")


def train(config: Mapping[str, Any]) -> dict[str, Tensor]:
    with Failing(config) as runner:
        with pytest.raises(RuntimeError, match="a bad sample"):
            runner.train()
        runner.train()
        return {
            name: whole(value.detach()).clone() for name, value in runner.model_state_dict().items()
        }


LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {
        "stack": "parallel",
        "parallel": {"axes": {"shard": 2}},
        "fsdp": {"gradient_sync": "last"},
    },
    "replicas of shards": {
        "stack": "parallel",
        "parallel": {"axes": {"shard": 2, "replicate": 2}},
        "fsdp": {"gradient_sync": "last_all_reduce"},
    },
    "canonical": {"gradient_sum": "canonical"},
    "canonical on shards": {
        "gradient_sum": "canonical",
        "stack": "parallel",
        "parallel": {"axes": {"shard": 2}},
    },
}


@pytest.mark.parametrize(
    "fails", ["after backward", "before backward", "in forward", "in backward"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_that_was_left_is_made_again(layout: str, fails: str, tmp_path: Path) -> None:
    can_reset = "shards" not in layout or hasattr(FSDPModule, "reset_iter_state")
    if fails.startswith("in") and not can_reset:
        pytest.skip("FSDP2 of this torch cannot repeat a forward or backward: an error says so.")
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(UPDATES):
        batch = slice(8 * update, 8 * update + 8)
        optimizer.zero_grad()
        functional.mse_loss(model(INPUTS[batch]), TARGETS[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    more = LAYOUTS[layout]
    ranks = 4 if layout == "replicas of shards" else 2
    loader: dict[str, Any] = {
        "accum_steps": 2,
        "dataloader": {"batch_size": 4 // ranks, "shuffle": False},
    }
    if "gradient_sum" in more:
        loader = {"dataloader": {"global_batch_size": 8, "micro_batch_size": 2, "shuffle": False}}
    config = settings(tmp_path, steps=UPDATES, fails=fails, **{**loader, **more})
    for found in run_processes(train, config, world_size=ranks, timeout=60):
        torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=1e-12)


def evaluate_averages(config: Mapping[str, Any]) -> float:
    """Return the loss of the averages of one update, in a process whose second update is left half-way if it is begun."""
    with Failing(config) as runner:
        try:
            runner.train(evaluate_splits=[])
        except RuntimeError as error:
            assert "a bad sample" in str(error)
        return float(runner.evaluate("val")["val"]["loss"])


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="FSDP2 of this torch cannot leave a forward.",
)
def test_an_evaluation_after_a_forward_that_was_left_is_of_the_averages(tmp_path: Path) -> None:
    """The parameters that the forward had gathered hid that the averages came in."""
    more = {
        "accum_steps": 2,
        "dataloader": {"batch_size": 2},
        "ema": {"enabled": True, "decay": 0.5},
        **LAYOUTS["shards"],
    }
    whole_run = settings(tmp_path / "whole", steps=1, fails="nowhere", **more)
    left = settings(tmp_path / "left", steps=2, fails="in forward", **more)
    expected = run_processes(evaluate_averages, whole_run, world_size=2, timeout=60)
    assert run_processes(evaluate_averages, left, world_size=2, timeout=60) == pytest.approx(
        expected, abs=1e-12
    )
