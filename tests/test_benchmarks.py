"""Benchmarks run, at sizes that say nothing of time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.programs import run_program

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "options", "figures"),
    [
        ("compile", ["--backend", "aot_eager_decomp_partition", "--rounds", "1"], {"starts", "steps", "memory"}),
        ("gpu", ["--workers", "0"], {"eager", "compiled", "save stops the loop"}),
    ],
)
def test_a_benchmark_measures(name: str, options: list[str], figures: set[str], tmp_path: Path) -> None:
    words = ("--small", *options, "--json", str(tmp_path / "figures.json"))
    ended = run_program(BENCHMARKS / f"{name}.py", *words, timeout=800)
    assert ended.exit_code == 0, ended.output
    assert figures <= set(json.loads((tmp_path / "figures.json").read_text()))
