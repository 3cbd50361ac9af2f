"""What a layout communicates is what theory says: the benchmark's own count, on real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from communication import count


@pytest.mark.parametrize("layout", ["FSDP 2", "PP 2", pytest.param("CP 2", marks=pytest.mark.slow)])
def test_an_update_makes_the_collectives_of_theory(layout: str) -> None:
    found = count(layout)
    assert found["calls"] == found["theory"]
