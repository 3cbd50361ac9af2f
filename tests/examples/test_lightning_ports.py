"""The examples that are written for Lightning as well are no longer than that, and the figures of the docs are those of the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.programs import run_program

ROOT = Path(__file__).parents[2]


def test_the_examples_are_shorter_than_their_ports() -> None:
    ended = run_program(ROOT / "benchmarks" / "port_lines.py", timeout=60)
    rows = dict(line.split(": ") for line in ended.output.splitlines() if " lines, " in line)
    page = (ROOT / "docs" / "guides" / "several_optimizers.md").read_text()
    assert rows.keys() == {"gan.py", "gpt.py"}
    for name, row in rows.items():
        here, port = (int(word) for word in row.split() if word.isdigit())
        assert here <= port and f"`examples/{name}` | {here} | {port} |" in page


@pytest.mark.slow
def test_the_ports_train(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    for name, figure in (("gan.py", "untrained"), ("gpt.py", "bits per character")):
        ended = run_program(
            ROOT / "benchmarks" / "ports" / name,
            "--steps",
            "4",
            "--dir",
            str(tmp_path / name),
            timeout=200,
        )
        assert ended.exit_code == 0 and figure in ended.output, ended.output
