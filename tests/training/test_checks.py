"""Wrong components are refused; what a program changes under training without meaning to is named once."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import danling as dl


class Keeping(nn.Sequential):
    def train(self, mode: bool = True) -> Keeping:
        super().train(mode)
        self[0].eval()
        return self


class Small(dl.Runner):
    """A classifier to which something is done in its first update, or when it is made."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        made: Any = None,
        done: Any = None,
        model: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.done = done
        self.model = model or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
        self.datasets = {"train": data, "val": data}
        if made is not None:
            made(self)

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        if self.done is not None and self.state.train.global_step == 1:
            self.done(self)
        return super().train_step(data)


def warnings_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, **parts: Any) -> list[str]:
    config = {
        "seed": 1,
        "epochs": 3,
        "dir": str(tmp_path),
        "log": False,
        "dataloader": {"batch_size": 4},
    }
    caplog.clear()
    with Small({**config, **parts.pop("settings", {})}, **parts) as runner:
        runner.train()
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def frozen_in_evaluation(runner: Small) -> None:
    runner.model[0].requires_grad_(False).eval()
    runner.optimizer = torch.optim.SGD(runner.model[2].parameters(), lr=0.1)


def of_another_optimizer(runner: Small) -> None:
    runner.scheduler = LambdaLR(
        torch.optim.SGD(runner.model.parameters(), lr=0.1), lambda step: 1.0
    )


def joint(runner: Small) -> None:
    first = torch.optim.SGD(runner.model[0].parameters(), lr=0.1)
    runner.optimizer = dl.optim.JointOptimizer(
        first, torch.optim.SGD(runner.model[2].parameters(), lr=0.1)
    )
    runner.scheduler = LambdaLR(first, lambda step: 1.0)


def replace(runner: Small) -> None:
    runner.unwrapped_model[2].weight = nn.Parameter(torch.zeros(2, 8))  # type: ignore[index]


def replace_all(runner: Small) -> None:
    replace(runner)
    runner.optimizer.add_param_group({"params": [runner.unwrapped_model[2].weight]})  # type: ignore[index]


def left_out(runner: Small) -> None:
    runner.optimizer = torch.optim.SGD(runner.model[2].parameters(), lr=0.1)


def frozen(runner: Small) -> None:
    left_out(runner)
    runner.model[0].requires_grad_(False)


def unfreeze(runner: Small) -> None:
    runner.unwrapped_model[0].requires_grad_()  # type: ignore[index]


def evaluate_part(runner: Small) -> None:
    runner.unwrapped_model[1].eval()  # type: ignore[index]


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "whole-model-as-from-pretrained": ({"made": lambda runner: runner.model.eval()}, []),
    "frozen-part-at-first": (
        {"made": frozen_in_evaluation},
        ["Frozen parts of the model were in evaluation mode when training began: 0."],
    ),
    "kept-by-the-model": (
        {"model": Keeping(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))},
        [],
    ),
    "whole-model-left": (
        {"done": lambda runner: runner.unwrapped_model.eval()},
        ["In evaluation mode while it trains: the whole model."],
    ),
    "part-left": ({"done": evaluate_part}, ["In evaluation mode while it trains: 1."]),
    "other-optimizer": (
        {"made": of_another_optimizer},
        ["self.scheduler, a LambdaLR, moves the learning rates of another optimizer"],
    ),
    "part-of-a-joint-one": ({"made": joint}, []),
    "replaced": (
        {"done": replace},
        [
            "Expected every parameter that requires a gradient in the optimizer. Received: a SGD without 2.weight,"
        ],
    ),
    "replaced-besides-one-left-out": (
        {"made": left_out, "done": replace},
        [
            f"Expected every parameter that requires a gradient in the optimizer. Received: a SGD without {n}"
            for n in ("0.weight", "2.weight,")
        ],
    ),
    "unfrozen": (
        {"made": frozen, "done": unfreeze},
        [
            "Expected every parameter that requires a gradient in the optimizer. Received: a SGD without 0.weight, 0.bias,"
        ],
    ),
    "replaced-and-optimized": (
        {"done": replace_all},
        ["1 parameter group was added to the optimizer"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_named_once(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts, expected = CASES[name]
    found = warnings_of(tmp_path, caplog, **parts)
    assert len(found) == len(expected), found
    assert all(text.startswith(start) for text, start in zip(found, expected)), found


class Modes(Small):
    """Notes the mode of a part in every update, and freezes it at the start of a pass."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.modes: list[bool] = []

    def on_pass_start(self, split: str) -> None:
        self.unwrapped_model[1].eval()  # type: ignore[index]

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        self.modes.append(self.unwrapped_model[1].training)  # type: ignore[index]
        return super().train_step(data)


def test_an_evaluation_leaves_each_part_in_its_mode(tmp_path: Path) -> None:
    config = {
        "steps": 4,
        "evaluate_interval": 1,
        "dir": str(tmp_path),
        "log": False,
        "dataloader": {"batch_size": 4},
    }
    with Modes(config) as runner:
        runner.train()
        assert runner.modes == [False] * 4


def step_by_epoch(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


SCHEDULES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], bool]] = {
    "epochs-meant": (step_by_epoch, {}, True),
    "epochs-meant-logged-rarely": (step_by_epoch, {"epochs": 30, "log_interval": 25}, True),
    "by-epoch": (step_by_epoch, {"scheduler": {"interval": "epoch"}}, False),
    "warm-up": (
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1e-7, 1.0, 30),
        {"epochs": 10},
        False,
    ),
    "to-zero-at-the-end": (
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 40),
        {"epochs": 10},
        False,
    ),
    "restarts": (
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        {"epochs": 10},
        False,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_only_a_collapsing_rate_is_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build, settings, warns = SCHEDULES[name]
    caplog.set_level(logging.INFO, "danling")

    def made(runner: Small) -> None:
        runner.scheduler = build(runner.optimizer)

    found = warnings_of(
        tmp_path, caplog, made=made, settings={"epochs": 8, "log_interval": 1, **settings}
    )
    assert len(found) == warns and all(
        text.startswith("The learning rate has fallen to ") for text in found
    ), found
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    lines = [text for text in told if " advances after every update" in text]
    assert len(lines) == ("scheduler" not in settings)
    assert all("4 times an epoch" in line and "scheduler.interval=epoch" in line for line in lines)


def plateau(runner: Small) -> None:
    runner.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(runner.optimizer)
    runner.datasets = {"train": runner.datasets["train"]}


def lbfgs(runner: Small) -> None:
    runner.optimizer = torch.optim.LBFGS(runner.model.parameters())


def named_otherwise(*names: str) -> Any:
    def make(runner: Small) -> None:
        runner.optimizer = None
        for name in names:
            setattr(runner, name, torch.optim.SGD(runner.model.parameters()))

    return make


SLIPS: dict[str, tuple[Any, str]] = {
    "model": (nn.Linear, "Make an instance of it"),
    "criterion": (nn.CrossEntropyLoss, r"Write CrossEntropyLoss\(\)"),
    "optimizer": ("adam", "`self.optimizer` to be a torch.optim.Optimizer"),
    "scheduler": ("cosine", "`self.scheduler` to be a scheduler"),
    "metrics": ({"loss": max}, "a metric called 'loss'"),
    "datasets": ([1, 2], "`self.datasets` to be a mapping by split"),
    "dataloaders": ({"train": iter([1])}, "iterated again in each of 3 epochs"),
    "a metric of an evaluation": (plateau, "an evaluation split for ReduceLROnPlateau"),
    "a closure": (lbfgs, "LBFGS, whose step calls a closure"),
    "of none": (lambda runner: setattr(runner, "optimizer", None), "Received: optimizer=None"),
    "one under another name": (
        named_otherwise("adam"),
        "You have set `self.adam`: did you mean `self.optimizer`",
    ),
    "two under other names": (
        named_otherwise("opt_g", "opt_d"),
        "{'opt_g': self.opt_g, 'opt_d': self.opt_d} in __init__",
    ),
}


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_among_the_components_is_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value, expected = SLIPS[name]
    made = value if " " in name else lambda runner: setattr(runner, name, value)
    with pytest.raises(ValueError, match=expected):
        warnings_of(tmp_path, caplog, made=made)


class Scaling(Small):
    """Scales its loss as a loop by hand does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scaler = torch.amp.GradScaler("cpu")

    def train_step(self, data: Any) -> Any:
        pred = self.model(data[0])
        loss = self.criterion(pred, data[1])
        self.backward(self.scaler.scale(loss))
        return pred, loss


class Unscaling(Scaling):
    def optimizer_step(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.scaler.get_scale()
        super().optimizer_step()


class UnscalingInStep(Scaling):
    def train_step(self, data: Any) -> Any:
        pred, loss = super().train_step(data)
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()
        return pred, loss


@pytest.mark.parametrize(("kind", "times"), [(Scaling, 1), (Unscaling, 0), (UnscalingInStep, 0)])
def test_scaler_that_nothing_undoes_is_named_once(
    kind: type[Small], times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"steps": 2, "dir": str(tmp_path), "log": False, "optim": {"type": "sgd", "lr": 1e-9}}
    with kind(config) as runner:
        runner.train()
        runner.config.steps = 4
        runner.train()
    assert sum("self.scaler is a GradScaler" in line for line in caplog.messages) == times


class Tied(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.embedding(inputs))


def different(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.full_like(value, float(index))
        for index, (name, value) in enumerate(state.items())
    }


@pytest.mark.parametrize(
    ("tied", "stored_tied", "change", "expected"),
    [
        (True, True, dict, ""),
        (
            True,
            False,
            dict,
            "embedding.weight, head.weight are one weight of the model, and have different values in what was loaded",
        ),
        (
            False,
            True,
            dict,
            "embedding.weight, head.weight are one weight in what was loaded, and several in the model",
        ),
        (False, False, dict, ""),
        (
            True,
            True,
            different,
            "are one weight of the model, and have different values in what was loaded: those of 'head.weight'",
        ),
    ],
)
def test_untied_weights_are_named(
    tied: bool,
    stored_tied: bool,
    change: Any,
    expected: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.save(change(copy.deepcopy(Tied(stored_tied)).state_dict()), tmp_path / "weights.pt")
    settings = {"epochs": 1, "pretrained": str(tmp_path / "weights.pt")}
    found = warnings_of(tmp_path / "run", caplog, model=Tied(tied), settings=settings)
    assert [expected in text for text in found] == [True] * bool(expected), found


def test_a_loop_by_hand_needs_no_optimizer_on_the_runner(tmp_path: Path) -> None:
    def without(runner: Small) -> None:
        runner.optimizer = None

    with Small({"steps": 1, "dir": str(tmp_path), "log": False}, made=without) as runner:
        with runner.session():
            runner.state.train.global_step += 1
            assert not runner.boundary()
        assert (tmp_path / "checkpoints" / "latest.pth").exists()


class Counting(nn.Linear):
    """Counts positive samples, or all of them, in an attribute of Python."""

    def __init__(self, least: float) -> None:
        super().__init__(4, 2)
        self.least, self.count = least, 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"counts": [self.count, torch.tensor(self.count)], "name": "count"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["counts"][0]

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += int((inputs[:, 0] > self.least).sum())
        found: Tensor = super().forward(inputs)
        return found


class CountingLoss(nn.CrossEntropyLoss):
    """As `Counting` does, by the first prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        self.count += int((pred[:, 0] > 0).sum())
        return super().forward(pred, target)


class Placed(nn.Identity):
    """Has a state with tensors that are not plain, and numbers that differ between ranks where asked."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "sparse": torch.eye(2).to_sparse(),
            "conj": torch.tensor([1.0 + self.numbers[0] * 1j]).conj(),
            "numbers": self.numbers,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.numbers = state["numbers"]


def named_extra_states(
    directory: Path,
    least: float,
    in_criterion: bool = False,
    layers: Callable[[int], list[nn.Module]] | None = None,
) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    settings = {
        "seed": 1,
        "steps": 4,
        "dir": str(directory),
        "log": False,
        "dataloader": {"batch_size": 1},
    }
    torch.manual_seed(2)
    more = layers(int(os.environ["RANK"])) if layers is not None else []
    model = nn.Sequential(Counting(least), nn.Tanh(), *more)
    with Small({**settings, "checkpoint.interval": 1}, model=model) as runner:
        if in_criterion:
            runner.criterion = CountingLoss()
        runner.train()
    return [message for message in found if "get_extra_state" in message]


def test_extra_states_that_differ_between_ranks_are_named_once(tmp_path: Path) -> None:
    ((message,), others) = run_processes(named_extra_states, tmp_path / "differ", 0.0, world_size=2)
    assert (
        "get_extra_state() of model.0 returns something else on other ranks" in message
        and others == []
    )
    ((message,), _) = run_processes(
        named_extra_states, tmp_path / "criterion", -1e9, True, world_size=2
    )
    assert "get_extra_state() of criterion returns something else" in message
    assert run_processes(named_extra_states, tmp_path / "same", -1e9, world_size=2) == [[], []]


def of_one_rank(rank: int) -> list[nn.Module]:
    return [Placed([1])] if rank == 0 else []


def of_both_ranks(rank: int) -> list[nn.Module]:
    return [Placed([1, 23] if rank else [1, 2, 3])]


def test_extra_states_of_other_modules_and_tensors_are_compared(tmp_path: Path) -> None:
    assert run_processes(
        named_extra_states, tmp_path / "one", -1e9, False, of_one_rank, world_size=2
    ) == [[], []]
    ((message,), others) = run_processes(
        named_extra_states, tmp_path / "both", -1e9, False, of_both_ranks, world_size=2
    )
    assert "get_extra_state() of model.2 returns something else" in message and others == []
