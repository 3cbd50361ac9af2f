"""The benchmark of compilation runs, at a size and with a backend that say nothing of time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.programs import run_program


@pytest.mark.slow
def test_the_benchmark_of_compilation_measures_starts_updates_and_memory(tmp_path: Path) -> None:
    figures = tmp_path / "compile.json"
    program = Path(__file__).parents[1] / "benchmarks" / "compile.py"
    options = ("--small", "--backend", "aot_eager_decomp_partition", "--rounds", "1", "--json", str(figures))
    ended = run_program(program, *options, timeout=250)
    assert ended.exit_code == 0, ended.output
    found = json.loads(figures.read_text())
    assert set(found["starts"]["gpt"]) == {"cold", "warm", "portable"}
    assert found["steps"]["mlp"]["eager"]["ratio"] == 1.0 and found["steps"]["gpt"]["graph"]["median_us"] > 0
    kept = found["memory"]["gpt"]
    assert kept["default"] > kept["budget:0.5"] > kept["budget:0.1"]
