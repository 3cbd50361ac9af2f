"""What `train_step` leaves to the runner: the gradients of the window, and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed
from support.toys import differences, line_of, settings
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import DataLoader

import danling as dl
from danling.utils.tensors import whole


class Loop(dl.Runner):
    """Calls something before the forward, or between forward and backward, of each micro-batch."""

    before: Callable[[Loop], None] = staticmethod(lambda runner: None)
    between: Callable[[Loop], None] = staticmethod(lambda runner: None)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        torch.manual_seed(2)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.datasets = {"train": line_of(16)}
        self.other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def train_step(self, data: Any) -> Any:
        self.before(self)
        with self.train_context():
            pred = self.model(data[0])
            loss = self.compute_loss(pred, data[1])
            self.between(self)
            self.backward(loss)
        return pred, loss


def make_zero(runner: Loop) -> None:
    runner.optimizer.zero_grad(set_to_none=False)


WAYS: dict[str, Callable[[Loop], None]] = {
    "optimizer.zero_grad()": lambda runner: runner.optimizer.zero_grad(),
    "set_to_none=False": make_zero,
    "model.zero_grad()": lambda runner: runner.model.zero_grad(),
    "one parameter": lambda runner: setattr(runner.unwrapped_model.bias, "grad", None),
}


def weights_of(
    config: dict[str, Any], where: str | None, way: Callable[[Loop], None]
) -> dict[str, Tensor]:
    """Train with a call at a place, and return the weights."""
    changed = type("Changed", (Loop,), {where: staticmethod(way)} if where else {})
    with changed(config) as runner:
        runner.train()
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


def config_of(root: Path | str, **more: Any) -> dict[str, Any]:
    return settings(root, steps=4, accum_steps=2, dataloader={"batch_size": 2}, **more)


@pytest.mark.parametrize("where", ["before", "between"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_dropped_by_train_step_are_refused(way: str, where: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"before the backward of micro-batch 2 .*Remove zero_grad\(\)"
    ):
        weights_of(config_of(tmp_path), where, WAYS[way])


@needs_deepspeed
@pytest.mark.parametrize(
    ("stage", "way"), [(0, "optimizer.zero_grad()"), (0, "one parameter"), (1, "model.zero_grad()")]
)
def test_gradients_that_an_engine_leaves_in_the_parameters_are_not_dropped(
    stage: int, way: str, tmp_path: Path
) -> None:
    engine = {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage}}}
    with pytest.raises(
        ValueError, match=r"before the backward of micro-batch 2 .*Remove zero_grad\(\)"
    ):
        weights_of(config_of(tmp_path, **engine), "before", WAYS[way])


@needs_deepspeed
@pytest.mark.parametrize(("stage", "way"), [(1, "optimizer.zero_grad()"), (2, "model.zero_grad()")])
def test_zero_grad_loses_nothing_if_an_engine_has_taken_the_gradients(
    stage: int, way: str, tmp_path: Path
) -> None:
    engine = {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": stage}}}
    plain, zeroed = (
        weights_of(config_of(tmp_path / str(where), **engine), where, WAYS[way])
        for where in (None, "before")
    )
    assert differences(plain, zeroed) == []


class Uneven(dl.Runner):
    """Has as many batches as its rank allows, and a step that enters no context."""

    def __init__(self, config: Mapping[str, Any], batches: list[list[list[int]]]) -> None:
        super().__init__(config)
        torch.manual_seed(2)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        mine = batches[self.data_domain.rank]
        self.dataloaders = {"train": DataLoader(line_of(16), batch_sampler=mine)}

    def train_step(self, data: Any) -> Any:
        pred = self.model(data[0])
        loss = self.criterion(pred, data[1])
        self.backward(loss)
        return pred, loss


UNEVEN = [
    [[0], [1, 2], [3], [4, 5], [6], [7]],
    [[8], [9, 10, 11], [12], [13, 14]],
]
"""Of the two ranks. The last update has three micro-batches on the first, and one on the second."""


def uneven_weights(root: str, stack: str) -> dict[str, Tensor]:
    config = settings(root, epochs=1, accum_steps=3, stack=stack, parallel={"axes": {"shard": 2}})
    with Uneven(config, UNEVEN) as runner:
        runner.train()
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


@pytest.mark.parametrize("stack", ["ddp", "accelerate", "parallel"])
def test_step_without_context_may_have_other_windows_on_other_ranks(
    stack: str, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    model = nn.Linear(3, 1)
    inputs, targets = line_of(16).tensors
    # A divided model needs all ranks in each micro-batch: the pass ends with the shortest.
    length = 4 if stack == "parallel" else 6
    for first in (0, 3):
        batches = [mine[:length] for mine in UNEVEN]
        update = [row for mine in batches for batch in mine[first : first + 3] for row in batch]
        loss = nn.functional.mse_loss(model(inputs[update]), targets[update])
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters()))
        ):
            parameter.data.sub_(0.1 * gradient)
    for weights in run_processes(uneven_weights, str(tmp_path), stack):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


class InItsContexts(Uneven):
    """Enters the context of the runner in its step, or that of torch."""

    topology: Any

    def __init__(self, config: Mapping[str, Any], own: bool) -> None:
        super().__init__(config, [[[0, 1], [2], [3, 4]]] * 2)
        self.own = own

    def parallelize_model(self, model: nn.Module) -> None:
        plan = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, self.topology.mesh("tensor"), plan)

    def train_step(self, data: Any) -> Any:
        with loss_parallel() if self.own else self.train_context():
            return super().train_step(data)


def weights_in_contexts(root: str, own: bool, axes: dict[str, int]) -> dict[str, Tensor]:
    given: dict[str, Any] = {"stack": "parallel", "parallel": {"axes": axes}} if axes else {}
    with InItsContexts(settings(root, epochs=1, accum_steps=2, **given), own) as runner:
        runner.train()
        return {name: whole(value).clone() for name, value in runner.model_state_dict().items()}


@pytest.mark.parametrize("own", [False, True])
def test_step_may_enter_the_contexts_of_a_divided_model(own: bool, tmp_path: Path) -> None:
    plain = weights_in_contexts(str(tmp_path / "one"), own, {})
    for weights in run_processes(weights_in_contexts, str(tmp_path / "two"), own, {"tensor": 2}):
        for name, value in plain.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


def refused(root: str, stack: dict[str, Any]) -> bool:
    try:
        weights_of(config_of(root, **stack), "before", WAYS["optimizer.zero_grad()"])
    except ValueError as error:
        return "Remove zero_grad()" in str(error)
    return False


SHARDED: dict[str, Any] = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}


@pytest.mark.parametrize(
    "stack",
    [{"stack": "ddp"}, {"stack": "accelerate"}, SHARDED],
    ids=["ddp", "accelerate", "sharded"],
)
def test_they_are_refused_on_two_ranks(stack: dict[str, Any], tmp_path: Path) -> None:
    assert run_processes(refused, str(tmp_path), stack) == [True, True]


def of_shards(root: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights with and without zero_grad where gradients add up elsewhere than in the parameters until the last backward."""
    stack, way = {**SHARDED, "fsdp": {"gradient_sync": "last"}}, WAYS["optimizer.zero_grad()"]
    plain, zeroed = (
        weights_of(config_of(f"{root}/{where}", **stack), where, way) for where in (None, "before")
    )
    return plain, zeroed


def test_zero_grad_loses_nothing_if_shards_are_reduced_once(tmp_path: Path) -> None:
    for plain, zeroed in run_processes(of_shards, str(tmp_path)):
        assert differences(plain, zeroed) == []


def zero_at_first(runner: Loop) -> None:
    if runner.window.count == 1:
        runner.optimizer.zero_grad()


def halve(runner: Loop) -> None:
    """Write to the gradients that are there, without dropping them, by the factor one."""
    for parameter in runner.unwrapped_model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.0)


def by_hand() -> dict[str, Tensor]:
    """Return the weights of a loop of torch's, in the order of the runner's data."""
    batches: list[Any] = []

    class Recorded(Loop):
        def train_step(self, data: Any) -> Any:
            batches.append([part.clone() for part in data])
            return super().train_step(data)

    with Recorded(
        settings("by_hand", steps=4, accum_steps=2, dataloader={"batch_size": 2})
    ) as runner:
        runner.train()
    torch.manual_seed(2)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for update in range(4):
        for inputs, target in batches[2 * update : 2 * update + 2]:
            (nn.functional.mse_loss(model(inputs), target)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


HARMLESS: dict[str, Callable[[Loop], None]] = {
    "at the first micro-batch": zero_at_first,
    "of another optimizer": lambda runner: runner.other.zero_grad(),
    "written in place": halve,
}


@pytest.mark.parametrize("way", HARMLESS)
def test_harmless_zero_grad_changes_nothing(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = weights_of(config_of(tmp_path / "plain"), None, HARMLESS[way])
    assert (
        differences(weights_of(config_of(tmp_path / "way"), "before", HARMLESS[way]), plain) == []
    )
    assert differences(by_hand(), plain) == []


def test_without_accumulation_zero_grad_is_harmless(tmp_path: Path) -> None:
    way = WAYS["optimizer.zero_grad()"]
    found = [
        weights_of({**config_of(tmp_path / str(where)), "accum_steps": 1}, where, way)
        for where in (None, "before")
    ]
    assert differences(*found) == []


@pytest.mark.parametrize("accum_steps", [1, 2])
@pytest.mark.parametrize(
    "schedule", [{"type": "cosine"}, {"type": "steplr", "step_size": 2, "interval": "epoch"}]
)
def test_schedule_advanced_by_train_step_is_refused(
    schedule: dict[str, Any], accum_steps: int, tmp_path: Path
) -> None:
    config = {**config_of(tmp_path, scheduler=schedule), "accum_steps": accum_steps}
    with pytest.raises(
        ValueError, match=rf"advanced {accum_steps} times in an update. Remove scheduler.step\(\)"
    ):
        weights_of(config, "before", lambda runner: runner.scheduler.step())


def test_schedule_advanced_in_optimizer_step_is_refused(tmp_path: Path) -> None:
    class Stepping(Loop):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            self.scheduler.step()

    runner = Stepping(config_of(tmp_path, scheduler={"type": "cosine"}))
    with (
        runner,
        pytest.raises(
            ValueError, match=r"`optimizer_step` to leave the schedule .*advanced 1 times in"
        ),
    ):
        runner.train()


class Phased(Loop):
    """Steps two optimizers by name, and in the second update the schedule of one of them, or of both, itself."""

    def __init__(self, config: Any, stepped: str) -> None:
        super().__init__(config)
        first, *others = self.model.parameters()
        members = {"first": torch.optim.SGD([first], 0.1), "others": torch.optim.SGD(others, 0.1)}
        self.optimizer = members
        if "scheduler" not in config:
            self.scheduler = {
                name: torch.optim.lr_scheduler.StepLR(each, 2) for name, each in members.items()
            }
        self.stepped = stepped

    def train_step(self, data: Any) -> Any:
        found: Any = None
        is_second = self.state.train.global_step == 1
        for name in ("first", "others"):
            with self.optimizing(name):
                found = super().train_step(data)
            if is_second and name == self.stepped:
                self.scheduler[name].step()
        if is_second and self.stepped == "both":
            self.scheduler.step()
        return found


@pytest.mark.parametrize(
    ("by_config", "stepped", "times"),
    [
        (True, "both", 1),
        (False, "both", 2),
        (False, "first", 1),
        (False, "others", 1),
        (False, "", 0),
        (True, "", 0),
    ],
)
def test_schedules_of_several_optimizers_are_left_to_the_runner(
    by_config: bool, stepped: str, times: int, tmp_path: Path
) -> None:
    schedule = {"scheduler": {"type": "steplr", "step_size": 2}} if by_config else {}
    with Phased({**config_of(tmp_path, **schedule), "accum_steps": 1}, stepped) as runner:
        if not times:
            runner.train()
            schedules = [runner.scheduler] if by_config else runner.scheduler
            assert {each.last_epoch for each in schedules} == {runner.train_state.global_step}
            return
        with pytest.raises(
            ValueError,
            match=rf"`train_step` to leave the schedule .*advanced {times} times in an update",
        ):
            runner.train()


class SteppingAfterStep(Loop):
    def step(self) -> Any:
        outcome = super().step()
        self.scheduler.step()
        return outcome


class SteppingInPass(Loop):
    def on_pass_start(self, split: str) -> None:
        if self.state.train.global_step:
            self.scheduler.step()


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("program", [SteppingAfterStep, SteppingInPass])
def test_schedule_advanced_between_updates_is_refused(
    program: type[Loop], interval: str, tmp_path: Path
) -> None:
    schedule = {"type": "steplr", "step_size": 2, "interval": interval}
    runner = program({**config_of(tmp_path, scheduler=schedule), "steps": None, "epochs": 3})
    with (
        runner,
        pytest.raises(
            ValueError, match=r"Expected your program to leave the schedule to the runner"
        ),
    ):
        runner.train()


def test_schedule_set_back_between_updates_is_kept(tmp_path: Path) -> None:
    class Restarting(Loop):
        def on_pass_start(self, split: str) -> None:
            self.scheduler.last_epoch = 0

    with Restarting(
        {
            **config_of(tmp_path, scheduler={"type": "steplr", "step_size": 2}),
            "steps": None,
            "epochs": 3,
        }
    ) as runner:
        runner.train()
        assert (
            runner.state.train.epoch == 3
            and runner.scheduler.last_epoch == runner.state.train.global_step // 3
        )


def test_a_schedule_of_another_optimizer_is_the_programs(tmp_path: Path) -> None:
    class Own(Loop):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            self.own_schedule = torch.optim.lr_scheduler.StepLR(self.other, 1)

        def train_step(self, data: Any) -> Any:
            self.other.step()
            self.own_schedule.step()
            return super().train_step(data)

    with Own(config_of(tmp_path, scheduler={"type": "cosine"})) as runner:
        runner.train()
        assert runner.train_state.global_step == 4 and runner.own_schedule.last_epoch == 8
