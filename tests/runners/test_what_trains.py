"""What an optimizer leaves out, or trains besides, is said when training begins; what gets no gradient, in the first update."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import Chain, Line, settings
from torch import nn


class Net(nn.Module):
    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        if spare:
            self.spare = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class Trained(Line):
    spare = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Net(spare=self.spare)

    def ddp_kwargs(self) -> dict[str, Any]:
        return {**super().ddp_kwargs(), "find_unused_parameters": self.spare}


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    with caplog.at_level(logging.WARNING, logger="danling"):
        yield lambda text: [r.message for r in caplog.records if text in r.message]


def test_model_set_after_construction_is_refused(tmp_path: Path) -> None:
    with Trained(settings(tmp_path, steps=3)) as runner:
        runner.model = Net()
        with pytest.raises(
            ValueError, match="would train nothing of it .body.weight, .* after construction"
        ):
            runner.train()
        assert runner.state.train.global_step == 0
        # With an optimizer of its own it can be trained.
        runner.optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.1)
        before = runner.model.head.weight.detach().clone()
        runner.train()
        assert not torch.equal(runner.model.head.weight, before)


def test_averages_belong_to_the_model_of_construction(tmp_path: Path) -> None:
    with Trained(settings(tmp_path, steps=3, ema={"enabled": True})) as runner:
        runner.model = Net()
        runner.optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="the model that the runner was constructed with"):
            runner.train()


class Foreign(Trained):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)


def test_an_optimizer_of_another_model_is_refused_before_a_verb_can_be_called(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="a SGD over 4 others, which would train nothing of it"):
        Foreign(settings(tmp_path, steps=3, optim={}))


class Replaced(Trained):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model.head = nn.Linear(4, 1)


def test_parameters_without_an_optimizer_and_others_are_named_once(
    tmp_path: Path, said: Any
) -> None:
    with Replaced(settings(tmp_path, steps=3, optim={})) as runner:
        runner.train()
        runner.config.steps = 5
        runner.train()
    assert len(said("Expected every parameter that requires a gradient in the optimizer")) == 1
    assert "head.weight, head.bias" in said("in the optimizer. Received: a SGD without")[0]
    assert len(said("with 2 others of the shapes [(1, 4), (1,)]")) == 1


class Spare(Trained):
    spare = True


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_a_parameter_without_a_gradient_is_named_once(
    accum_steps: int, tmp_path: Path, said: Any
) -> None:
    with Spare(settings(tmp_path, steps=3, accum_steps=accum_steps)) as runner:
        runner.train()
    messages = said("Expected a gradient for every parameter")
    assert len(messages) == 1
    assert "for spare.weight, spare.bias. The loss" in messages[0]


class OwnStep(Trained):
    """Computes the loss in its own step, in the context of the forward or not."""

    is_cast = False

    def train_step(self, data: Any) -> Any:
        with self.forward_context() if self.is_cast else nullcontext():
            pred = self.model(data[0])
            loss = self.criterion(pred.float(), data[1])
        self.dtype = pred.dtype
        self.backward(loss)
        return pred, loss


@pytest.mark.parametrize(
    ("precision", "is_cast", "dtype", "lines"),
    [("bf16", False, torch.float32, 1), ("bf16", True, torch.bfloat16, 0), (None, False, torch.float32, 0)],
)  # fmt: skip
def test_precision_that_an_own_step_does_not_use_is_named_once(
    precision: str | None,
    is_cast: bool,
    dtype: torch.dtype,
    lines: int,
    tmp_path: Path,
    said: Any,
) -> None:
    with OwnStep(settings(tmp_path, steps=3, accum_steps=2, precision=precision)) as runner:
        runner.is_cast = is_cast
        runner.train()
        assert runner.dtype == dtype
    assert len(said("Expected train_step to enter self.forward_context()")) == lines


def test_right_program_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, logger="danling"),
        Trained(settings(tmp_path, steps=3)) as runner,
    ):
        runner.train()
    assert not [r.message for r in caplog.records if "Expected" in r.message]


def heard() -> list[str]:
    """Return a list that takes what this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    return messages


def trained_on(
    root: str, stack: dict[str, Any], replace: bool, spare: bool
) -> tuple[list[str], str]:
    messages = heard()
    with (Spare if spare else Trained)(settings(root, steps=3, **stack)) as runner:
        if replace:
            runner.model = Net()
            runner.optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.1)
        try:
            runner.train()
        except ValueError as error:
            return messages, str(error)
    return messages, ""


SHARDED = {"stack": "parallel", "parallel.axes.shard": 2}


@pytest.mark.parametrize("stack", [{}, SHARDED], ids=["ddp", "fsdp"])
def test_parameters_without_a_gradient_are_named_on_several_processes(
    stack: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_processes(trained_on, str(tmp_path), stack, False, True, world_size=2)
    named = [[m for m in messages if "Expected a gradient" in m] for messages, _ in ranks]
    assert [len(found) for found in named] == [1, 0]
    assert "for spare.weight, spare.bias. The loss" in named[0][0]


def test_replaced_model_is_refused_if_gradients_are_reduced(tmp_path: Path) -> None:
    for _, error in run_processes(trained_on, str(tmp_path), {}, True, False, world_size=2):
        assert "the model that the runner was constructed with" in error


class HalfTrained(Chain):
    """The first stage has nothing that is trained by the optimizer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.optimizer = torch.optim.SGD(self.model[2].parameters(), lr=0.1)


def trained_in_stages(root: str) -> list[str]:
    messages = heard()
    config = settings(root, steps=3, stack="parallel", parallel={"axes": {"pipeline": 2}}, optim={})
    with HalfTrained(config) as runner:
        runner.train()
    return [message for message in messages if "Expected" in message]


def test_a_stage_without_anything_to_train_is_no_error(tmp_path: Path) -> None:
    first, second = run_processes(trained_in_stages, str(tmp_path), world_size=2)
    assert not second
    assert len(first) == 1
    assert "without 0.weight, 0.bias" in first[0]
