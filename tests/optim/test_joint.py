"""Several optimizers as one: the same steps as apart, and the same again after a restore."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from danling.optim import JointOptimizer
from danling.optim.state import load_named_state_dict, named_state_dict, own_dtypes


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).tanh())


def members(model: Pair) -> tuple[Adam, SGD]:
    return Adam(model.first.parameters(), lr=0.1), SGD(
        model.second.parameters(), lr=0.2, momentum=0.9
    )


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
    with pytest.raises(
        ValueError, match="every member to be a torch.optim.Optimizer. Received: 'adam'"
    ):
        JointOptimizer(generator="adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no closure"):
        JointOptimizer(*members(model)).step(lambda: 0.0)


def stepped(model: Pair) -> JointOptimizer:
    optimizer = JointOptimizer(*members(model))
    train(model, [optimizer], 2)
    return optimizer


def loaded_into_members(optimizer: JointOptimizer) -> JointOptimizer:
    for member in optimizer.optimizers:
        member.load_state_dict(copy.deepcopy(member.state_dict()))
    return optimizer


def extended(optimizer: JointOptimizer) -> JointOptimizer:
    optimizer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    return optimizer


def copied(optimizer: JointOptimizer) -> JointOptimizer:
    return copy.deepcopy(optimizer)


def pickled(optimizer: JointOptimizer) -> JointOptimizer:
    found: JointOptimizer = pickle.loads(pickle.dumps(optimizer))
    return found


@pytest.mark.parametrize(
    "change", [lambda joint: joint, loaded_into_members, extended, copied, pickled]
)
def test_state_and_groups_are_those_of_the_members_at_any_time(
    change: Callable[[JointOptimizer], JointOptimizer],
) -> None:
    model = Pair()
    optimizer = change(stepped(model))
    first, second = optimizer.optimizers
    groups = [*first.param_groups, *second.param_groups]
    assert len(groups) >= 2 and [id(group) for group in optimizer.param_groups] == [
        id(group) for group in groups
    ]
    assert dict(optimizer.state) == {**first.state, **second.state} and len(optimizer.state) == 4
    for member in (first, second):
        for parameter, state in member.state.items():
            assert optimizer.state[parameter] is state
    weight = second.param_groups[0]["params"][0]
    optimizer.state[weight]["momentum_buffer"].zero_()
    assert not second.state_dict()["state"][0]["momentum_buffer"].any()
    number = [id(parameter) for group in groups for parameter in group["params"]].index(id(weight))
    assert not optimizer.state_dict()["state"][number]["momentum_buffer"].any()


def test_looking_at_a_state_that_has_not_begun_leaves_none() -> None:
    model = Pair()
    optimizer = JointOptimizer(*members(model))
    weight = model.first.weight
    assert (
        not optimizer.state
        and weight not in optimizer.state
        and optimizer.state.get(weight) is None
    )
    assert not optimizer.state_dict()["state"]
    optimizer.state[weight]["mine"] = 1
    assert optimizer.optimizers[0].state[weight] == {"mine": 1}
    with pytest.raises(KeyError):
        optimizer.state[torch.zeros(1)]


@pytest.mark.parametrize(
    "kind", [JointOptimizer, lambda adam, sgd: Adam([*adam.param_groups[0]["params"]])]
)
def test_state_that_has_not_begun_is_set_and_removed_as_that_of_one_optimizer(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    model = Pair()
    state: Any = kind(*members(model)).state
    weight = model.first.weight
    assert state.pop(weight, "none") == "none" and not state
    with pytest.raises(KeyError):
        state.pop(weight)
    begun = {"mine": 1}
    assert state.setdefault(weight, begun) is begun and state[weight] is begun
    assert state.setdefault(weight, {}) is begun
    assert state.pop(weight) is begun and weight not in state


def test_what_no_member_would_see_is_refused() -> None:
    optimizer: Any = JointOptimizer(*members(Pair()))
    with pytest.raises(ValueError, match="add_param_group of one of"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for name in ("state", "param_groups"):
        with pytest.raises(ValueError, match=rf"Received: JointOptimizer\.{name} = "):
            setattr(optimizer, name, {})
    with pytest.raises(AttributeError):
        optimizer.param_groups.append({"params": [nn.Parameter(torch.ones(1))]})


def test_hooks_of_saving_and_loading_are_called() -> None:
    optimizer, seen = stepped(Pair()), list[str]()
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: seen.append(f"load {state['mine']}")
    )
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "load 1", "loaded"]


def test_hook_of_loading_does_not_change_the_given_state() -> None:
    optimizer = stepped(Pair())
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state.update(mine=1))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert "mine" not in state


def test_states_keep_their_dtypes_where_torch_would_cast_them() -> None:
    """As DeepSpeed's engine loads them: torch casts the state of a parameter in half precision."""
    parameters = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = JointOptimizer(*(Adam([parameter]) for parameter in parameters))
    for parameter in parameters:
        state = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full((2,), 1 / 3),
            "exp_avg_sq": torch.ones(2),
        }
        optimizer.state[parameter].update(state)
    saved = copy.deepcopy(optimizer.state_dict())
    with own_dtypes(optimizer):
        optimizer.load_state_dict(saved)
    assert all(
        torch.equal(optimizer.state[p]["exp_avg"], torch.full((2,), 1 / 3)) for p in parameters
    )
