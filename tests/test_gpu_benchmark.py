"""The benchmark for a GPU runs where there is none, at a size that says nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.programs import run_program


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_measures_both_loops(tmp_path: Path) -> None:
    figures = tmp_path / "gpu.json"
    program = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    ended = run_program(program, "--small", "--workers", "0", "--json", str(figures), timeout=300)
    assert ended.exit_code == 0, ended.output
    found = json.loads(figures.read_text())
    for kind in ("eager", "compiled"):
        assert found[kind]["runner"]["tokens_per_second"] > 0
        assert (found[kind]["runner"]["gap_share"] is None) != torch.cuda.is_available()
    assert set(found["save stops the loop"]) == {"disabled", "async"}
