"""The digests of all ranks side by side: what they add up to, and which of those that should be equal are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

OWN = "own"
"""Kind of tensors of which every rank holds something else."""
LOCAL = ".local"
"""Ending of columns of tensors to which a forward writes on each rank by itself, so that copies of them rightly differ."""
_HALF = 1 << 32
_WORD = 1 << 64

Kinds = Mapping[str, tuple[int, ...]]
"""How a rank holds tensors, by kind, such as `shard` for those divided over this axis: which part it has. Equal parts are copies."""


@dataclass(frozen=True)
class Drift:
    """A column in which ranks that hold copies differ.

    Attributes:
        kind: How its tensors are divided.
        column: The column.
        ranks: The ranks that differ from most of those that hold the same part; from the first one where no value has a majority.
        others: The ranks that they differ from.
    """

    kind: str
    column: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]


class DigestTable:
    """Says where the digests of each rank stand in the vector that is summed over the ranks, and reads the sum.

    Every rank fills its own place and leaves zeros in those of others, so that a sum over the ranks has all of them. A digest of 64 bits
    goes as two numbers of 32 bits, which float64 holds exactly.

    Args:
        columns: Names of the columns; the same on all ranks.
        ranks: How each rank holds tensors.
    """

    def __init__(self, columns: Sequence[str], ranks: Sequence[Kinds]) -> None:
        self.columns = list(columns)
        self.ranks = list(ranks)
        self.kinds = sorted({kind for held in ranks for kind in held})
        self.width = len(self.kinds) * len(self.columns) + 1

    def place(self, kind: str, column: str) -> int:
        """Return the place of a cell among those of its rank. The last one, which has no kind, is that of the samples."""
        return self.kinds.index(kind) * len(self.columns) + self.columns.index(column)

    def packed(self, cells: Tensor, rank: int) -> Tensor:
        """Return the vector to be summed over the ranks.

        Args:
            cells: int64 of shape `(width,)`: what this rank has.
            rank: Its number.
        """
        whole = torch.zeros((len(self.ranks), 2, self.width), dtype=torch.float64, device=cells.device)
        whole[rank, 0] = (cells & (_HALF - 1)).double()
        whole[rank, 1] = ((cells >> 32) & (_HALF - 1)).double()
        return whole.reshape(-1)

    def unpacked(self, sums: Sequence[float]) -> list[list[int]]:
        """Return the cells of each rank, as integers from 0 to 2^64 - 1.

        Args:
            sums: The sum of what `packed` returned on all ranks.
        """
        size = 2 * self.width
        rows = [sums[start : start + size] for start in range(0, size * len(self.ranks), size)]
        return [
            [int(low) + _HALF * int(high) for low, high in zip(row[: self.width], row[self.width :])] for row in rows
        ]

    def totals(self, rows: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the digest of each column over all ranks, in which each part counts once; `samples` is one of them.

        Args:
            rows: What `unpacked` returned.
        """
        sums = dict.fromkeys(self.columns, 0)
        for kind in self.kinds:
            for holders in self._holders(kind).values():
                for column in self.columns:
                    sums[column] += rows[holders[0]][self.place(kind, column)]
        sums["samples"] = sum(row[-1] for row in rows)
        return {column: value % _WORD for column, value in sums.items()}

    def drifted(self, rows: Sequence[Sequence[int]]) -> list[Drift]:
        """Return where ranks differ that hold copies, the first column first.

        Args:
            rows: What `unpacked` returned.
        """
        found = []
        compared = [column for column in self.columns if not column.endswith(LOCAL)]
        for column in compared:
            for kind in self.kinds:
                for holders in self._holders(kind).values() if kind != OWN else ():
                    values = [rows[rank][self.place(kind, column)] for rank in holders]
                    if len(set(values)) > 1:
                        found.append(_drift(kind, column, holders, values))
        return found

    def _holders(self, kind: str) -> dict[tuple[int, ...], list[int]]:
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, held in enumerate(self.ranks):
            if kind in held:
                holders.setdefault(held[kind], []).append(rank)
        return holders


def _drift(kind: str, column: str, holders: Sequence[int], values: Sequence[int]) -> Drift:
    value, number = Counter(values).most_common(1)[0]
    usual = value if 2 * number > len(values) else values[0]
    odd = tuple(rank for rank, found in zip(holders, values) if found != usual)
    return Drift(kind, column, odd, tuple(rank for rank in holders if rank not in odd))
