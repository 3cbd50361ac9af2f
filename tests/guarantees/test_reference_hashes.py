"""The script that compares the results of two versions of the code sees none where the code is the same, and names one that there is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from guarantees import reference_hashes

NAMES = ["fsdp 2"]


def script(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["reference_hashes.py", *arguments, "--only", *NAMES])
    return reference_hashes.main()


def test_the_same_code_gives_the_same_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "reference.json"
    assert script(monkeypatch, "--write", str(kept)) == 0
    capsys.readouterr()
    assert script(monkeypatch, "--compare", str(kept)) == 0
    assert "1 as before, 0 differ" in capsys.readouterr().out


def test_a_difference_is_named_with_its_path() -> None:
    before = {
        "fsdp 2": {
            "rank 1": {"/model/weight": "float32[2] 0a", "/state/step": "5"},
            "files": ["latest"],
        }
    }
    after = {
        "fsdp 2": {"rank 1": {"/model/weight": "float32[2] 0b", "/state/step": "5"}, "files": []}
    }
    assert list(reference_hashes.differences(before, before)) == []
    assert list(reference_hashes.differences(before, after)) == [
        "fsdp 2 | files: ['latest'] before, [] now",
        "fsdp 2 | rank 1 | /model/weight: float32[2] 0a before, float32[2] 0b now",
    ]
