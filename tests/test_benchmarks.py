"""Benchmarks run, at sizes that say nothing of time; what they count is what theory says, and what must not grow with ranks does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.programs import run_program, run_python
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks import scale

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "options", "figures"),
    [
        (
            "compile",
            ["--backend", "aot_eager_decomp_partition", "--rounds", "1"],
            {"starts", "steps", "memory"},
        ),
    ],
)
def test_a_benchmark_measures(
    name: str, options: list[str], figures: set[str], tmp_path: Path
) -> None:
    words = ("--small", *options, "--json", str(tmp_path / "figures.json"))
    ended = run_program(BENCHMARKS / f"{name}.py", *words, timeout=800)
    assert ended.exit_code == 0, ended.output
    assert figures <= set(json.loads((tmp_path / "figures.json").read_text()))


@pytest.mark.parametrize("words", [("--steps", "100"), ("--peers", "Ignit")])
def test_peers_refuses_what_it_would_not_measure(words: tuple[str, str]) -> None:
    """It printed a time below zero, and the table without the peer."""
    exit_code, output = run_python(BENCHMARKS / "peers.py", *words, warm=True)
    assert exit_code == 2, output
    assert words[0] in output and words[1] in output


@pytest.mark.parametrize("layout", ["FSDP 2", "PP 2", pytest.param("CP 2", marks=pytest.mark.slow)])
def test_an_update_makes_the_collectives_of_theory(layout: str) -> None:
    exit_code, output = run_python(
        BENCHMARKS / "communication.py", layout, "--json", "counts.json", warm=True
    )
    assert exit_code == 0, output
    found = json.loads(Path("counts.json").read_text())[layout]
    assert found["calls"] == found["theory"]
    assert found["theory"]


def _values(ranks: int) -> dict[str, float]:
    return {f"{figure.what} {figure.unit}": figure.value for figure in scale.measure_start(ranks)}


def test_an_update_agrees_on_as_much_for_any_number_of_ranks() -> None:
    few, many = _values(64), _values(16384)
    assert few["an update agrees on bytes"] == many["an update agrees on bytes"] > 0


def test_derived_plans_equal_the_plans_of_the_ranks() -> None:
    with scale.place(0, 8):
        plan = scale.local_plan(0, 8)[0]
    for rank in (3, 7):
        with scale.place(rank, 8):
            own = scale.local_plan(rank, 8)[0]
        derived = scale.plan_of(plan, rank, 8)
        tensors = [item for item in own.items if item.tensor_data is not None]
        assert SavePlan(sorted(derived.items, key=str)).items == sorted(tensors, key=str)
    assert not torch.distributed.is_initialized()
