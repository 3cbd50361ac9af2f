"""`benchmarks/accelerate_cost.py` measures three ways that make the same updates, in one process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from support.processes import run_processes

pytest.importorskip("accelerate")

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")

Figures = dict[str, dict[str, float]]


def measured(root: str, *, from_dataset: bool) -> tuple[dict[str, int], Figures]:
    sys.path.insert(0, BENCHMARKS)
    from accelerate_cost import BY_HAND, measure
    from pairs import summarize
    from workload import Workload

    times = measure(Workload((4, 8, 10), 4, 3), 2, root, time.perf_counter, from_dataset=from_dataset)
    return {way: len(rounds) for way, rounds in times.items()}, summarize(times, BY_HAND)


@pytest.mark.parametrize("from_dataset", [False, True])
def test_ways_take_turns_and_are_divided_by_the_loop_by_hand(from_dataset: bool, tmp_path: Path) -> None:
    ((rounds, figures),) = run_processes(measured, str(tmp_path), from_dataset=from_dataset, world_size=1)
    assert rounds == {"stack accelerate": 2, "stack ddp": 2, "Accelerate by hand": 2}
    assert figures["Accelerate by hand"]["ratio"] == 1.0
    assert all(row["median_us"] > 0 for row in figures.values())
