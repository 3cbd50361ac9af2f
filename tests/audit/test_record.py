"""The file of digests: read back exactly, and cut back where a run resumes."""

from __future__ import annotations

import math
from pathlib import Path

from danling.audit.record import FILE, DigestFile, DigestLine, read_digests

LINES = [
    DigestLine(10, 0.1 + 0.2, 1e-300, {"weights.0": 3, "optimizer.0": (1 << 64) - 1, "samples": 5}),
    DigestLine(20, math.inf, None, {"weights.0": 0, "samples": 1 << 63}),
    DigestLine(30, 1.0, 2.0, {"weights.0": 1}),
]


def test_lines_are_read_back_as_they_were(tmp_path: Path) -> None:
    file = DigestFile(tmp_path / FILE, resume_step=0)
    for line in LINES:
        file.write(line)
    file.close()
    assert read_digests(tmp_path) == {line.step: line for line in LINES}
    assert LINES[0].total == 2 and read_digests(tmp_path / "none") == {}


def test_what_stood_behind_the_step_of_a_resume_is_cut_off_and_an_unfinished_line_is_left_out(tmp_path: Path) -> None:
    first = DigestFile(tmp_path / FILE, resume_step=0)
    for line in LINES:
        first.write(line)
    first.close()
    second = DigestFile(tmp_path / FILE, resume_step=20)
    second.write(DigestLine(25, 4.0, None, {}))
    second.close()
    with open(tmp_path / FILE, "a") as broken:
        broken.write('{"step": 35, "loss": "no number"}\n{"step": 40, "lo')
    assert list(read_digests(tmp_path)) == [10, 20, 25]
    problems: list[str] = []
    read_digests(tmp_path, problems)
    assert problems == [f"{tmp_path / FILE}: 1 of its 4 lines"]
