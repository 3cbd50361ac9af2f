"""Digests: the file is read back exactly and cut back where a run resumes; the digests of all ranks are packed, added up and compared."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from danling.audit.digests import (
    FILE,
    OWN,
    DigestFile,
    DigestLine,
    DigestTable,
    Drift,
    read_digests,
)

LINES = [
    DigestLine(10, 0.1 + 0.2, 1e-300, {"weights.0": 3, "optimizer.0": (1 << 64) - 1, "samples": 5}),
    DigestLine(20, math.inf, None, {"weights.0": 0, "samples": 1 << 63}),
    DigestLine(30, 1.0, 2.0, {"weights.0": 1}),
]


def test_lines_are_read_back_as_they_were(tmp_path: Path) -> None:
    file = DigestFile(tmp_path / FILE, resume_step=0)
    for line in LINES:
        file.add(line)
    file.close()
    assert read_digests(tmp_path) == {line.step: line for line in LINES}
    assert LINES[0].total == 2 and read_digests(tmp_path / "none") == {}


def test_lines_after_the_step_of_a_resume_are_cut_off_and_an_unfinished_line_is_left_out(
    tmp_path: Path,
) -> None:
    first = DigestFile(tmp_path / FILE, resume_step=0)
    for line in LINES:
        first.add(line)
    first.close()
    second = DigestFile(tmp_path / FILE, resume_step=20)
    second.add(DigestLine(25, 4.0, None, {}))
    second.close()
    with open(tmp_path / FILE, "a") as broken:
        broken.write('{"step": 35, "loss": "no number"}\n{"step": 40, "lo')
    assert list(read_digests(tmp_path)) == [10, 20, 25]
    problems: list[str] = []
    read_digests(tmp_path, problems)
    assert problems == [f"{tmp_path / FILE}: 1 of its 4 lines"]


# Two replicas of a model whose large tensors are divided in two: ranks 0 and 2 hold the first half, 1 and 3 the second.
RANKS = [{OWN: (r,), "shard": (r % 2,), "whole": ()} for r in range(4)]
COLUMNS = ["weights.0", "buffers"]


def summed(table: DigestTable, cells: list[list[int]]) -> list[list[int]]:
    packed = [
        table.packed(torch.tensor(row, dtype=torch.int64), rank) for rank, row in enumerate(cells)
    ]
    return table.unpacked(torch.stack(packed).sum(0).tolist())


def test_a_sum_of_floats_keeps_every_bit() -> None:
    table = DigestTable(COLUMNS, RANKS)
    generator = torch.Generator().manual_seed(5)
    cells = torch.randint(-(1 << 63), (1 << 63) - 1, (4, table.width), generator=generator).tolist()
    cells[0][0], cells[1][1] = -1, -(1 << 63)
    assert summed(table, cells) == [[value % (1 << 64) for value in row] for row in cells]


def filled(table: DigestTable) -> list[list[int]]:
    rows = [[0] * table.width for _ in RANKS]
    for rank, row in enumerate(rows):
        row[table.places["shard", "weights.0"]] = 100 + rank % 2
        row[table.places["whole", "weights.0"]] = 7
        row[table.places["whole", "buffers"]] = 1000 * (rank + 1)
        row[table.places[OWN, "weights.0"]] = rank
        row[-1] = 10**rank
    return rows


def test_each_part_counts_once_and_copies_agree() -> None:
    table = DigestTable(COLUMNS, RANKS)
    rows = filled(table)
    assert table.totals(rows) == {"weights.0": 100 + 101 + 7 + 6, "buffers": 1000, "samples": 1111}
    assert table.drift(rows) is None
    rows[0][-1] = (1 << 64) - 1
    assert table.totals(rows)["samples"] == 1109  # modulo 2^64


def test_rank_different_from_most_is_named_and_of_two_the_second() -> None:
    table = DigestTable(COLUMNS, RANKS)
    rows = filled(table)
    rows[2][table.places["shard", "weights.0"]] = 8
    rows[0][table.places["whole", "weights.0"]] = 8
    assert table.drift(rows) == Drift("shard", "weights.0", (2,), (0,))
    rows = filled(table)
    rows[0][table.places["whole", "weights.0"]] = 8
    assert table.drift(rows) == Drift("whole", "weights.0", (0,), (1, 2, 3))
    rows = filled(table)
    rows[2][table.places["whole", "weights.0"]] = rows[3][table.places["whole", "weights.0"]] = 8
    assert table.drift(rows) == Drift("whole", "weights.0", (2, 3), (0, 1))
