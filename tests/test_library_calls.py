"""How many Python calls of the library an update makes: each call costs about a microsecond, and nothing else shows a few more."""

from __future__ import annotations

import json
from pathlib import Path

from support.pages import ROOT
from support.programs import run_python

UPDATE = 90.5
"""Calls of an update, as `benchmarks/library_calls.py` counts them: the same number on each release of Python and torch."""
END_OF_PASS = 98
MARGIN = 1.05


def test_an_update_makes_no_more_calls_than_it_did(tmp_path: Path) -> None:
    ended = run_python(
        ROOT / "benchmarks" / "library_calls.py",
        "--json",
        str(tmp_path / "calls.json"),
        warm=True,
    )
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "calls.json").read_text())
    found_at = "Look with `python benchmarks/library_calls.py --functions`. Write the numbers here if they are worth it, or have fallen."
    assert found["update"] <= MARGIN * UPDATE, (
        f"{found['update']:.1f} calls an update, {UPDATE} before. {found_at}"
    )
    assert found["end_of_pass"] <= MARGIN * END_OF_PASS, (
        f"{found['end_of_pass']} calls, {END_OF_PASS} before. {found_at}"
    )
