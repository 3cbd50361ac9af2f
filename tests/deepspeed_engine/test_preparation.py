"""What an engine refuses, and what is known of a model before there is one; the engine itself is run by the tests of the stack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from danling.deepspeed.preparation import (
    EnginePreparation,
    check_criterion,
    check_dtype,
    check_optimizer,
)
from danling.distributed import LocalDomain


def preparation(async_mode: str | None = None) -> EnginePreparation:
    """Of one process, without an engine."""
    return EnginePreparation(LocalDomain(), LocalDomain(), stack="deepspeed", async_mode=async_mode)


def test_a_forward_of_an_engine_communicates() -> None:
    assert preparation().forward_communicates(nn.Identity()) == "stack='deepspeed'"


@pytest.mark.parametrize(("mode", "number"), [(None, 0), ("disabled", 0), ("async", 1), ("async_with_pinned_mem", 1)])
def test_an_asynchronous_save_has_no_effect(mode: str | None, number: int) -> None:
    assert [mode in line for line in preparation(mode).unused_settings() if mode] == [True] * number


def test_what_an_engine_refuses() -> None:
    with pytest.raises(ValueError, match="PReLU with 1"):
        check_criterion(nn.PReLU())
    for criterion in (None, nn.CrossEntropyLoss(), nn.PReLU().requires_grad_(False), nn.functional.mse_loss):
        check_criterion(criterion)
    with pytest.raises(ValueError, match=r"float64 in weight, bias"):
        check_dtype(nn.Linear(2, 2).double())
    check_dtype(nn.Linear(2, 2))
    muon = torch.optim.Muon(nn.Linear(2, 2, bias=False).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Muon with deepspeed.zero_optimization.stage=1"):
        check_optimizer(muon, {"zero_optimization": {"stage": 1}})
    check_optimizer(muon, {})
