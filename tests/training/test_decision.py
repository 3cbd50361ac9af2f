"""The decision of an update, without a runner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.processes import run_processes

from danling.distributed import Domain, LocalDomain, StepTotals
from danling.training.outcome import NonFiniteError, UpdateDecision


def objection(decision: UpdateDecision, totals: StepTotals, norm: float, **more: Any) -> str | None:
    given: dict[str, Any] = {"own_nonfinite": 0.0, "scales": False, "may_skip": False, "named": lambda: ["weight"]}
    return decision.objection(totals, torch.tensor(norm), step=7, **{**given, **more})


@pytest.mark.parametrize(
    "weight,bad,norm,settings,reason",
    [
        (4.0, 0.0, 1.0, {}, None),
        (0.0, 0.0, float("nan"), {}, "weightless"),
        (4.0, 0.0, float("inf"), {"scales": True}, "overflow"),
        (4.0, 1.0, 1.0, {"scales": True, "may_skip": True}, "overflow"),
        (4.0, 1.0, 1.0, {"may_skip": True}, "nonfinite"),
        (4.0, 0.0, float("nan"), {"may_skip": True}, "nonfinite"),
    ],
)
def test_why_an_update_is_not_made(
    weight: float, bad: float, norm: float, settings: dict[str, Any], reason: str | None
) -> None:
    decision = UpdateDecision(LocalDomain(), torch.device("cpu"))
    assert objection(decision, StepTotals(weight, 1.0, 4.0, bad), norm, **settings) == reason


def test_an_update_that_must_not_be_skipped_is_an_error_that_names_its_gradients() -> None:
    decision = UpdateDecision(LocalDomain(), torch.device("cpu"))
    with pytest.raises(NonFiniteError, match=r"at step 7.*on ranks \[0\].*\['weight'\]"):
        objection(decision, StepTotals(4.0, 1.0, 4.0, 1.0), 1.0, own_nonfinite=1.0)


def test_an_accelerator_is_asked_one_update_later() -> None:
    """`meta` stands for a device that the host does not wait for; what it would answer lies on the CPU."""
    decision = UpdateDecision(LocalDomain(), torch.device("meta"))
    decision._pending = (6, torch.tensor(True), 0.0)
    decision.raise_pending()
    decision.raise_pending()  # there is nothing left
    decision._pending = (6, torch.tensor(False), 1.0)
    with pytest.raises(NonFiniteError, match=r"at step 6.*on ranks \[0\].*dropped since"):
        decision.raise_pending()


def error_of_rank() -> str:
    domain = Domain()
    decision = UpdateDecision(domain, torch.device("cpu"))
    return str(decision.error(3, float(domain.rank == 1), ["a", f"own{domain.rank}"]))


def test_all_ranks_say_the_same() -> None:
    first, second = run_processes(error_of_rank, world_size=2, init_process_group=True)
    assert first == second and "on ranks [1]" in first and "['a', 'own0', 'own1']" in first
