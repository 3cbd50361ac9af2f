"""What must not grow with the number of ranks does not: the benchmark's own figures, in torch's fake process group."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks import scale


def _values(ranks: int) -> dict[str, float]:
    return {f"{figure.what} {figure.unit}": figure.value for figure in scale.measure_start(ranks)}


def test_an_update_agrees_on_as_much_for_any_number_of_ranks() -> None:
    few, many = _values(64), _values(16384)
    assert few["an update agrees on bytes"] == many["an update agrees on bytes"] > 0


def test_plans_that_are_derived_are_those_of_the_ranks() -> None:
    with scale.place(0, 8):
        plan = scale.local_plan(0, 8)[0]
    for rank in (3, 7):
        with scale.place(rank, 8):
            own = scale.local_plan(rank, 8)[0]
        derived = scale.plan_of(plan, rank, 8)
        tensors = [item for item in own.items if item.tensor_data is not None]
        assert SavePlan(sorted(derived.items, key=str)).items == sorted(tensors, key=str)
    assert not torch.distributed.is_initialized()
