"""`python -m danling.demo`: it kills a real program, and says whether the bits are the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.warm import interpreter

from danling import demo


def test_the_demo_kills_the_program_and_finds_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter())
    assert demo.main(["--kills", "2", "--dir", str(tmp_path / "demo")]) == 0
    said = capsys.readouterr().out
    kills = [int(number) for number in re.findall(r"SIGKILL after update (\d+)", said)]
    assert len(kills) == 2 and 0 < kills[0] < kills[1]
    hashes = re.findall(r"\b[0-9a-f]{64}\b", said)
    assert len(hashes) == 2 and len(set(hashes)) == 1
    assert "120 logged losses are the same, bit for bit" in said


SAME = [0.5] * 80
PROGRAM = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
run.mkdir(exist_ok=True)
(run / "metrics.jsonl").write_text(sys.argv[2])
print(50, flush=True)
time.sleep(float(sys.argv[3]))
print(sys.argv[4])
"""


@pytest.mark.parametrize(
    ("losses", "last", "is_same"),
    [
        ((SAME, SAME), ("a", "a"), True),
        ((SAME, [*SAME[:-1], 0.25]), ("a", "a"), False),
        ((SAME, SAME), ("a", "b"), False),
        ((SAME[1:], SAME[1:]), ("a", "a"), False),
    ],
    ids=["same", "loss", "hash", "missing"],
)
def test_a_difference_is_found(
    losses: tuple[list[float], list[float]],
    last: tuple[str, str],
    is_same: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program is replaced by one that logs and prints what the test says; the comparison is that of the demo."""
    starts: list[str] = []

    def start(directory: Path, updates: int) -> subprocess.Popen[str]:
        starts.append(directory.name)
        number = int(directory.name == "killed")
        lines = "".join(
            f'{{"step": {step}, "train/loss": {loss}}}\n'
            for step, loss in enumerate(losses[number])
        )
        words = [str(directory), lines, "60" if len(starts) == 2 else "0", last[number]]
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, text=True
        )

    monkeypatch.setattr(demo, "start", start)
    assert demo.compare(tmp_path, kills=1, seed=0) is is_same
    assert starts == ["alone", "killed", "killed"]


@pytest.mark.parametrize(
    ("words", "received"), [(["--kills", "0"], "--kills 0"), (["--dir", "there"], "--dir there")]
)
def test_impossible_options_are_refused(
    words: list[str], received: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("there").mkdir()
    with pytest.raises(SystemExit):
        demo.main(words)
    assert f"Received: {received}" in capsys.readouterr().err
