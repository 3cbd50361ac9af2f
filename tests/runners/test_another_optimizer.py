"""A run that is resumed with another optimizer than it was saved with: what differs is named, and the mend that is offered works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.toys import Chain, settings
from torch import nn
from torch.optim import SGD, Adam, Adamax, AdamW
from torch.optim.lr_scheduler import StepLR

import danling as dl
from danling.checkpoints import CheckpointMismatch

Build = Callable[[nn.Sequential], Any]


class Built(Chain):
    def __init__(self, config: dict[str, Any], build: Build, *, scheduled: bool = False) -> None:
        super().__init__(config)
        self.optimizer = build(self.model)
        if scheduled:
            self.scheduler = StepLR(self.optimizer, 10)


def two_groups(model: nn.Sequential) -> AdamW:
    return AdamW(
        [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}], lr=0.1
    )


def joint(first: type, second: type) -> Build:
    return lambda model: dl.optim.JointOptimizer(
        first(model[0].parameters()), second(model[2].parameters())
    )


def train(place: Path, build: Build, *, steps: int, scheduled: bool = False, **more: Any) -> Built:
    config = settings(place, steps=steps, auto_resume=True, optim={}, **more)
    with Built(config, build, scheduled=scheduled) as runner:
        runner.train()
    return runner


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1), lambda m: AdamW(m.parameters()), r"of AdamW, .* another one, with lr=0.1, mom"),
        (lambda m: AdamW(m.parameters()), lambda m: SGD(m.parameters(), momentum=0.9), r"of SGD, .* another one, with lr=.*betas="),
        (lambda m: AdamW(m.parameters()), lambda m: Adam(m.parameters()), r"of Adam, .* another one, with .*decoupled_weight_decay=True"),
        (lambda m: Adam(m.parameters()), lambda m: Adamax(m.parameters()), r"of Adamax, .* another one, with .*amsgrad="),
        (joint(AdamW, SGD), joint(SGD, AdamW), r"of JointOptimizer, .* another one, with .*betas="),
        (two_groups, lambda m: AdamW(m.parameters()), r"1 groups here, 2 stored"),
        (lambda m: AdamW(m[2].parameters()), lambda m: AdamW(m.parameters()), r"without \['0.bias', '0.weight'\]"),
    ],
    ids=["sgd-adamw", "adamw-sgd", "adamw-adam", "adam-adamax", "joint", "groups", "parameters"],
)  # fmt: skip
def test_another_optimizer_is_named_with_a_working_fix(
    tmp_path: Path, before: Build, after: Build, expected: str
) -> None:
    train(tmp_path, before, steps=2)
    with pytest.raises(CheckpointMismatch, match=expected) as refused:
        train(tmp_path, after, steps=4)
    assert "'optimizer' to checkpoint.exclude_from_loading" in str(refused.value)
    resumed = train(tmp_path, after, steps=4, checkpoint={"exclude_from_loading": ["optimizer"]})
    assert resumed.state.train.global_step == 4


def test_options_replaced_by_the_checkpoint_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        return [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]

    for steps in (2, 3):
        train(tmp_path, lambda m: SGD(m.parameters(), lr=0.1), steps=steps)
    assert not told()
    runner = train(tmp_path, lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9), steps=4)
    (message,) = told()
    assert "lr=0.1 (here 0.01), momentum=0 (here 0.9)" in message
    assert runner.optimizer.param_groups[0]["momentum"] == 0
    mended = {"exclude_from_loading": ["optimizer.param_groups"]}
    runner = train(
        tmp_path, lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9), steps=5, checkpoint=mended
    )
    assert (
        runner.optimizer.param_groups[0]["lr"],
        runner.optimizer.param_groups[0]["momentum"],
    ) == (0.01, 0.9)
    assert len(told()) == 1


def test_rate_moved_by_a_schedule_is_no_replaced_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (12, 14):
        runner = train(tmp_path, lambda m: SGD(m.parameters(), lr=0.1), steps=steps, scheduled=True)
    assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
