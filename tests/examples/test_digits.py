"""The example of the digits as a program; README, which is run, has it on two processes."""

from __future__ import annotations

import re
from pathlib import Path

from support.programs import run_python

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"


def accuracy_in(output: str) -> float:
    found = re.search(r"test accuracy (\S+),", output)
    assert found is not None, output
    return float(found.group(1))


def forms(text: str) -> set[str]:
    """Lines without their numbers and places."""
    without_places = re.sub(
        r"( in|Run directory:) /\S+", r"\1 DIR", text.replace(str(SCRIPT), "examples/digits.py")
    )
    return {
        re.sub(r"\d[\d.,:e+-]*\d[kM]?|\d[kM]?", "#", line)
        for line in without_places.strip().splitlines()
    }


def printed_in_the_docs() -> set[str]:
    page = (SCRIPT.parents[1] / "docs" / "guides" / "logging.md").read_text(encoding="utf-8")
    return forms(
        page.partition("<!-- digits: file -->")[2].partition("```text\n")[2].partition("```")[0]
    )


def test_one_process_reaches_95_percent_and_goes_on() -> None:
    exit_code, output = run_python(SCRIPT, "--dir", "file", warm=True)
    assert exit_code == 0, output
    assert accuracy_in(output) >= 0.95
    assert printed_in_the_docs() == forms(output), (
        "make the page anew: python scripts/screenshots.py --text"
    )
    exit_code, output = run_python(
        SCRIPT, "--dir", "file", "--epochs", "11", "--auto_resume", "true", warm=True
    )
    assert exit_code == 0, output
    assert "epoch 11:" in output
    assert "epoch 10:" not in output
    assert accuracy_in(output) >= 0.95
