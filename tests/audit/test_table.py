"""The digests of all ranks side by side: packed for a sum of floats, added up, compared."""

from __future__ import annotations

import torch

from danling.audit.table import OWN, DigestTable, Drift

# Two replicas of a model whose large tensors are divided in two: ranks 0 and 2 hold the first half, 1 and 3 the second.
RANKS = [{OWN: (r,), "shard": (r % 2,), "whole": ()} for r in range(4)]
COLUMNS = ["weights.0", "buffers.local"]


def summed(table: DigestTable, cells: list[list[int]]) -> list[list[int]]:
    packed = [table.packed(torch.tensor(row, dtype=torch.int64), rank) for rank, row in enumerate(cells)]
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
        row[table.place("shard", "weights.0")] = 100 + rank % 2
        row[table.place("whole", "weights.0")] = 7
        row[table.place("whole", "buffers.local")] = 1000 * (rank + 1)
        row[table.place(OWN, "weights.0")] = rank
        row[-1] = 10**rank
    return rows


def test_each_part_counts_once_and_copies_agree() -> None:
    table = DigestTable(COLUMNS, RANKS)
    rows = filled(table)
    assert table.totals(rows) == {"weights.0": 100 + 101 + 7 + 6, "buffers.local": 1000, "samples": 1111}
    assert table.drifted(rows) == []
    rows[0][-1] = (1 << 64) - 1
    assert table.totals(rows)["samples"] == 1109  # modulo 2^64


def test_the_rank_that_differs_from_most_is_named_and_of_two_the_second() -> None:
    table = DigestTable(COLUMNS, RANKS)
    rows = filled(table)
    rows[0][table.place("whole", "weights.0")] = 8
    rows[2][table.place("shard", "weights.0")] = 8
    assert table.drifted(rows) == [
        Drift("shard", "weights.0", (2,), (0,)),
        Drift("whole", "weights.0", (0,), (1, 2, 3)),
    ]
    rows = filled(table)
    rows[2][table.place("whole", "weights.0")] = rows[3][table.place("whole", "weights.0")] = 8
    assert table.drifted(rows) == [Drift("whole", "weights.0", (2, 3), (0, 1))]
