"""`benchmarks/streams.py` hands every sample over, each way, and measures a log of any length."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.programs import run_python

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "streams.py"


@pytest.mark.slow
def test_all_ways_are_measured(tmp_path: Path) -> None:
    finished = run_python(
        BENCHMARK,
        "--rounds",
        "1",
        "--samples",
        "2000",
        "--json",
        str(tmp_path / "figures.json"),
        timeout=250,
    )
    assert finished.exit_code == 0, finished.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    ways = ["queue", "files", "files, synced", "directory, file", "directory, sqlite"]
    assert list(figures)[:10] == [f"{size} {way}" for size in ("16 KiB", "4 MiB") for way in ways]
    assert all(figures[name]["samples/s"] > 0 for name in list(figures)[:10])
    trainers = {
        f"trainer, {size} directory, {log}"
        for size in ("16 KiB", "4 MiB")
        for log in ("file", "sqlite")
    }
    assert all(0 <= figures[name]["waits (%)"] < 100 for name in trainers)
    assert set(figures) - set(list(figures)[:10]) == {"log, file", "log, sqlite", *trainers}
