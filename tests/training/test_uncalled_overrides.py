"""Overridden methods that a training does not call are named once; those that it calls are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

VERBS = ("evaluate", "evaluate_epoch", "evaluate_steps", "train_epoch", "train_epochs")


class Counting(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 2)
        self.criterion = nn.CrossEntropyLoss()
        data = TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.long))
        self.datasets = {"train": data, "val": data}
        self.calls = 0


def counted(verb: str) -> Callable[..., Any]:
    def method(self: Counting, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return getattr(dl.TorchRunner, verb)(self, *args, **kwargs)

    return method


@pytest.mark.parametrize("unit", ["epochs", "steps"])
@pytest.mark.parametrize("verb", VERBS)
def test_an_override_is_called_or_named_once(
    verb: str, unit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind: Any = type("Own", (Counting,), {verb: counted(verb)})
    config = {unit: 2, "dir": str(tmp_path), "dataloader": {"batch_size": 2}}
    with kind({**config, "optim": {"type": "sgd", "lr": 0.1}}) as runner:
        runner.train()
        calls = runner.calls
        setattr(runner.config, unit, 4)
        runner.train()
    said = [text for text in caplog.messages if "does not call by itself" in text]
    # What was called in fact decides.
    assert len(said) == (0 if calls else 1), (calls, said)
    assert all(f"`{verb}` of Own" in text for text in said)


@pytest.mark.parametrize("unit", ["epochs", "steps"])
def test_overrides_of_a_class_that_serves_both_units_are_not_named(
    unit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verbs = ("evaluate_epoch", "evaluate_steps", "train_epoch", "train_steps")
    kind: Any = type("Both", (Counting,), {verb: counted(verb) for verb in verbs})
    config = {unit: 2, "dir": str(tmp_path), "dataloader": {"batch_size": 2}}
    with kind({**config, "optim": {"type": "sgd", "lr": 0.1}}) as runner:
        runner.train()
        assert runner.calls
    assert "does not call by itself" not in caplog.text


def test_without_splits_to_evaluate_no_evaluation_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind: Any = type("Own", (Counting,), {"evaluate": counted("evaluate")})
    optim = {"type": "sgd", "lr": 0.1}
    config = {"epochs": 1, "dir": str(tmp_path), "optim": optim, "evaluate_splits": []}
    with kind(config) as runner:
        runner.train()
    assert not [text for text in caplog.messages if "by itself" in text]
