"""What a layout communicates is what theory says: the benchmark's own count, on real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.kill import run_python

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "communication.py"


@pytest.mark.parametrize("layout", ["FSDP 2", "PP 2", pytest.param("CP 2", marks=pytest.mark.slow)])
def test_an_update_makes_the_collectives_of_theory(layout: str) -> None:
    exit_code, output = run_python(PROGRAM, layout, "--json", "counts.json", warm=True)
    assert exit_code == 0, output
    found = json.loads(Path("counts.json").read_text())[layout]
    assert found["calls"] == found["theory"]
    assert found["theory"]
