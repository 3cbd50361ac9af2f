"""What an engine refuses, and what is known of a model before there is one; the engine itself is run by the tests of the stack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from danling.deepspeed.preparation import EnginePreparation, check_trainable
from danling.distributed import LocalDomain


@pytest.mark.parametrize(
    ("mode", "number"), [(None, 0), ("disabled", 0), ("async", 1), ("async_with_pinned_mem", 1)]
)
def test_an_asynchronous_save_has_no_effect(mode: str | None, number: int) -> None:
    config = SimpleNamespace(checkpoint=SimpleNamespace(async_mode=mode))
    runner: Any = SimpleNamespace(world=LocalDomain(), stack="deepspeed", config=config)
    prepared = EnginePreparation(runner)
    assert [mode in line for line in prepared.idle_settings() if mode] == [True] * number
    assert prepared.forward_communicates(nn.Identity()) == "stack='deepspeed'"


def test_settings_impossible_for_an_engine_are_refused() -> None:
    model = nn.Linear(2, 2)
    for criterion in (
        None,
        nn.CrossEntropyLoss(),
        nn.PReLU().requires_grad_(False),
        nn.functional.mse_loss,
    ):
        check_trainable(model, criterion, None, 1)
    muon = torch.optim.Muon(nn.Linear(2, 2, bias=False).parameters(), lr=0.1)
    check_trainable(model, None, muon, 0)
    refused: list[tuple[Any, Any, Any, str]] = [
        (model, nn.PReLU(), None, "PReLU with 1"),
        (nn.Linear(2, 2).double(), None, None, "float64 in weight, bias"),
        (model, None, muon, "Muon with deepspeed.zero_optimization.stage=1"),
    ]
    turns = nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
    refused.append((turns, None, None, "complex ones in 0"))
    refused.append(
        (nn.ParameterList([torch.tensor(1.0)]), None, None, "those without one .* Received: 0")
    )
    for wrong, criterion, optimizer, message in refused:
        with pytest.raises(ValueError, match=message):
            check_trainable(wrong, criterion, optimizer, 1, ranks=2)
    check_trainable(nn.ParameterList([torch.tensor(1.0)]), None, None, 1)  # one rank sends nothing
    check_trainable(turns.requires_grad_(False), None, None, 1)
