"""Stretches of the examples, trained again by `danling audit`, are bitwise the stored ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.warm import interpreter

from danling.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
BY_STEPS = ("--steps", "12", "--checkpoint.interval", "4", "--evaluate_interval", "12")
BY_EPOCHS = ("--epochs", "2", "--checkpoint.interval", "1")
WORDS: dict[str, tuple[str, ...]] = {
    "gan": BY_STEPS,
    "contrastive": BY_EPOCHS,
    "digits": BY_EPOCHS,
    "early_stop": BY_EPOCHS,
    "regression": BY_EPOCHS,
    "uncertainty": BY_EPOCHS,
}


@pytest.mark.parametrize(
    "name", [name if name == "gan" else pytest.param(name, marks=pytest.mark.slow) for name in WORDS]
)
def test_an_example_is_bitwise_what_its_files_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program = [
        interpreter(),
        str(EXAMPLES / f"{name}.py"),
        "--dir",
        "run",
        "--audit.digest_interval",
        "1",
        *WORDS[name],
    ]
    subprocess.run(program, check=True, capture_output=True, timeout=200)
    assert main(["audit", "run", "--json", "--", *program]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["same"] and facts["partings"] == [] and 0 < facts["from"] < facts["to"]
