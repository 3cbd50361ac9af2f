"""An optimizer's state in dtypes of its own, and what its own `state_dict` adds, come back on every stack."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.processes import run_processes
from support.toys import differences
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.optim import JointOptimizer
from danling.utils.tensors import whole

STOP, END = 3, 7


class Slow(torch.optim.Optimizer):
    """Momentum in a dtype of its own, with a text and a list, and slow weights that only its own `state_dict` knows.

    Args:
        params: Parameters.
        dtype: Of the momentum.
        adds: Whether there are slow weights, which every third update sets, and an entry that belongs to no parameter.
    """

    def __init__(self, params: Any, dtype: torch.dtype, *, adds: bool = True) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtype, self.adds = dtype, adds
        self.slow: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        rate = self.param_groups[0]["lr"]
        if self.adds and not self.slow:
            self.slow = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter, dtype=self.dtype)
                state["count"], state["kind"] = torch.zeros((), dtype=torch.int64), "heavy"
            assert state["kind"] == "heavy" and state["momentum"].dtype == self.dtype
            state["momentum"].mul_(0.9).add_(parameter.grad.to(self.dtype))
            state["count"] += 1
            parameter.add_((-rate * state["momentum"]).to(parameter.dtype))
        if self.adds:
            shared = self.state["lookahead"]  # type: ignore[index]
            shared["rounds"] = shared.get("rounds", 0) + 1
            if shared["rounds"] % 3 == 0:
                for parameter, slow in zip(parameters, self.slow):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        options = {
            "alpha": 0.5,
            3: ("a", None),
            "rounds": {3, (1, "a")},
            "rates": numpy.arange(2.0),
        }
        own = {"slow": list(self.slow), "options": options} if self.adds else {}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.adds:
            options = dict(state_dict["options"])
            assert options.pop("rates").tolist() == [0.0, 1.0]
            assert options == {"alpha": 0.5, 3: ("a", None), "rounds": {3, (1, "a")}}
            self.slow = [slow.clone() for slow in state_dict["slow"]]


def points(dtype: torch.dtype) -> TensorDataset:
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(4))
    return TensorDataset(inputs.to(dtype), inputs.sum(1, keepdim=True).to(dtype))


def model_of(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(dtype)


class Slowly(dl.Runner):
    def __init__(
        self,
        config: Mapping[str, Any],
        weights: torch.dtype,
        moments: torch.dtype,
        adds: bool,
        joint: bool = False,
    ) -> None:
        super().__init__(config)
        self.model, self.criterion = model_of(weights), nn.MSELoss()
        parts = (
            [self.model.parameters()]
            if not joint
            else [self.model[0].parameters(), self.model[2].parameters()]
        )
        optimizers = [Slow(part, moments, adds=adds) for part in parts]
        self.optimizer = JointOptimizer(*optimizers) if joint else optimizers[0]
        self.datasets = {"train": points(weights)}


def train(root: str, stops: list[int], more: dict[str, Any], *options: Any) -> dict[str, Tensor]:
    """Train to each of some updates, in another runner each; return the weights."""
    for steps in stops:
        config: dict[str, Any] = {
            "dir": root,
            "seed": 1,
            "log": False,
            "steps": steps,
            "auto_resume": True,
        }
        config |= {"dataloader": {"global_batch_size": 4, "shuffle": False}, "optim": {"lr": 0.1}}
        if more.get("stack") == "deepspeed":
            config["dataloader"] = {"batch_size": 4 // int(more.pop("ranks", 2)), "shuffle": False}
        with Slowly({**config, **more}, *options) as runner:
            runner.train()
            found = {
                name: whole(value).detach().clone()
                for name, value in runner.model_state_dict().items()
            }
    return found


def by_hand(weights: torch.dtype, moments: torch.dtype, adds: bool) -> dict[str, Tensor]:
    """Return the weights of the same updates without this library."""
    model, data = model_of(weights), points(weights)
    optimizer = Slow(model.parameters(), moments, adds=adds)
    for update in range(END):
        first = 4 * (update % 3)
        inputs, targets = data[first : first + 4]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


FLOAT, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16
STACKS: dict[str, dict[str, Any]] = {
    "ddp": {"stack": "ddp"},
    "dcp": {"stack": "ddp", "checkpoint.backend": "dcp"},
    "parallel": {"stack": "parallel", "parallel": {"axes": {"shard": 2}}},
    "accelerate": {"stack": "accelerate"},
    "joint": {"stack": "ddp"},
}


KINDS = {"fp32": (HALF, FLOAT), "fp64": (FLOAT, DOUBLE), "bf16": (FLOAT, HALF)}
"""Dtypes of the weights and of the momentum."""
QUICK = {
    ("ddp", "fp32"),
    ("ddp", "bf16"),
    ("parallel", "fp32"),
    ("accelerate", "fp32"),
    ("joint", "fp64"),
}
EVERY = [(stack, name) for stack in STACKS for name in KINDS]


@pytest.mark.parametrize(
    ("stack", "kinds"),
    [
        pytest.param(
            stack,
            KINDS[name],
            id=f"{stack}-{name}",
            marks=[] if (stack, name) in QUICK else pytest.mark.slow,
        )
        for stack, name in EVERY
    ],
)
def test_state_comes_back_in_its_own_dtype_with_added_entries(
    stack: str, kinds: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    size = 2 if stack == "parallel" or kinds == (FLOAT, DOUBLE) else 1
    ends = []
    for name, stops in (("whole", [END]), ("parts", [STOP, STOP + 1, END])):
        options = (str(tmp_path / name), stops, STACKS[stack], *kinds, True, stack == "joint")
        ends.append(run_processes(train, *options, world_size=size, timeout=120)[0])
    assert differences(ends[1], ends[0]) == []
    expected = by_hand(*kinds, True)
    tolerance = 0.0 if size == 1 else (1e-2 if kinds[0] == HALF else 1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(ends[0][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2))]
)
def test_engine_restores_dtypes(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    more = {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage}}}
    if stage:
        more["deepspeed"]["zero_allow_untested_optimizer"] = True
    ends = []
    for name, stops in (("whole", [END]), ("parts", [STOP, END])):
        ends += run_processes(
            train,
            str(tmp_path / name),
            stops,
            more,
            FLOAT,
            DOUBLE,
            False,
            world_size=2,
            timeout=200,
        )
    assert differences(ends[2], ends[0]) == []
    for name, value in by_hand(FLOAT, DOUBLE, False).items():
        torch.testing.assert_close(ends[0][name], value, rtol=1e-4, atol=1e-5)


def test_moments_follow_weights_with_a_changed_dtype(tmp_path: Path) -> None:
    """As torch does it: Adam takes no moments of another dtype than its gradient."""

    class Plain(dl.Runner):
        def __init__(self, config: Any, dtype: torch.dtype) -> None:
            super().__init__(config)
            self.model, self.criterion, self.datasets = (
                model_of(dtype),
                nn.MSELoss(),
                {"train": points(dtype)},
            )

    config: dict[str, Any] = {
        "dir": str(tmp_path),
        "seed": 1,
        "log": False,
        "optim": {"type": "adam", "lr": 0.1},
    }
    for dtype, steps in ((FLOAT, 2), (HALF, 4)):
        with Plain(
            {**config, "steps": steps, "auto_resume": True, "dataloader": {"batch_size": 4}}, dtype
        ) as runner:
            runner.train()
            assert runner.optimizer.state_dict()["state"][0]["exp_avg"].dtype == dtype


def test_unsavable_state_is_refused_at_the_save(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "helper": object()}

    class Runs(dl.Runner):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.criterion, self.datasets = (
                model_of(FLOAT),
                nn.MSELoss(),
                {"train": points(FLOAT)},
            )
            self.optimizer = Odd(self.model.parameters(), lr=0.1)

    config = {"dir": str(tmp_path), "steps": 1, "log": False, "dataloader": {"batch_size": 4}}
    with pytest.raises(ValueError, match=r"own\['helper'\] of type object"), Runs(config) as runner:
        runner.train()


def test_checkpoint_without_the_added_entries_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from danling.optim.state import load_named_state_dict, named_state_dict

    model = model_of(FLOAT)
    optimizer = Slow(model.parameters(), DOUBLE)
    model(points(FLOAT)[:][0]).sum().backward()
    optimizer.step()
    state: dict[str, Any] = named_state_dict(optimizer, model.named_parameters())
    del state["own"]
    with caplog.at_level(logging.WARNING, "danling"):
        load_named_state_dict(optimizer, state, model.named_parameters())
    assert "does not contain slow, options of the optimizer" in caplog.text
