"""Several optimizers as one: the same steps as apart, and the same again after a restore."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from danling.optim import JointOptimizer
from danling.optim.state import load_named_state_dict, named_state_dict


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def members(model: Pair) -> tuple[Adam, SGD]:
    return Adam(model.first.parameters(), lr=0.1), SGD(model.second.parameters(), lr=0.2, momentum=0.9)


def train(model: Pair, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(first: Pair, second: Pair) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))


def test_steps_as_its_members_apart() -> None:
    apart, together = Pair(), Pair()
    train(apart, list(members(apart)), 5)
    train(together, [JointOptimizer(*members(together))], 5)
    assert same(apart, together)


def test_goes_on_bitwise_from_its_state_by_parameter_name() -> None:
    model = Pair()
    optimizer = JointOptimizer(*members(model))
    train(model, [optimizer], 2)
    state = copy.deepcopy(named_state_dict(optimizer, model.named_parameters()))
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    resumed = Pair()
    resumed.load_state_dict(model.state_dict())
    again = JointOptimizer(*members(resumed))
    load_named_state_dict(again, state, resumed.named_parameters())
    train(model, [optimizer], 3)
    train(resumed, [again], 3)
    assert same(model, resumed)


def test_a_schedule_sets_the_rates_of_all_members_also_after_a_restore() -> None:
    model = Pair()
    optimizer = JointOptimizer(*members(model))
    optimizer.load_state_dict(optimizer.state_dict())
    schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, [optimizer], 1)
    schedule.step()
    assert [member.param_groups[0]["lr"] for member in optimizer.optimizers] == [0.05, 0.1]


def test_refuses_a_shared_parameter_no_member_and_a_closure() -> None:
    model = Pair()
    with pytest.raises(ValueError, match="more than one parameter group"):
        JointOptimizer(Adam(model.parameters()), SGD(model.second.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="0 without a name and 0 by name"):
        JointOptimizer()
    with pytest.raises(ValueError, match="every member to be a torch.optim.Optimizer. Received: 'adam'"):
        JointOptimizer(generator="adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no closure"):
        JointOptimizer(*members(model)).step(lambda: 0.0)
