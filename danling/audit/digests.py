"""Digests of updates: the file of a run, the digests of all ranks in one table, and the environment that a run was made in."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danling.reporting.trackers import JsonLines, bounded_lines, read_jsonl
from danling.utils.files import open_file

FILE = "digests.jsonl"
"""Its name in the run directory."""


@dataclass(frozen=True)
class DigestLine:
    """The digests of one update."""

    step: int
    loss: float
    grad_norm: float | None
    digests: Mapping[str, int]

    @property
    def total(self) -> int:
        """One digest of all of them but the samples, and but what ranks write by themselves."""
        return sum(value for name, value in self.digests.items() if name != "samples") % (1 << 64)


class DigestFile:
    """Writes the digests of a run; what an earlier attempt wrote after the step that the run resumes from is cut off."""

    def __init__(self, file: str | os.PathLike[str], *, resume_step: int) -> None:
        self._lines = JsonLines(file, resume_step=resume_step)

    def write(self, line: DigestLine) -> None:
        """Append a line; floats are written so that they are read back exactly, those that are not finite as texts."""
        values = {"step": line.step, "loss": _exact(line.loss), "grad_norm": _exact(line.grad_norm)}
        digests = {name: f"{value:016x}" for name, value in line.digests.items()}
        self._lines.write({**values, "total": f"{line.total:016x}", **digests})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_digests(run: str | os.PathLike[str], problems: list[str] | None = None) -> dict[int, DigestLine]:
    """Return the digests of a run by step; empty where it has none."""
    file = Path(run, FILE)
    if not file.is_file():
        return {}
    found = [line for line in map(_line, read_jsonl(file)) if line is not None]
    with open_file(file) as lines:
        written = sum(1 for _ in bounded_lines(lines))
    if problems is not None and len(found) < written:
        problems.append(f"{file}: {written - len(found)} of its {written} lines")
    return {line.step: line for line in found}


def _line(record: Mapping[str, object]) -> DigestLine | None:
    try:
        digests = {
            name: int(str(value), 16)
            for name, value in record.items()
            if name not in ("step", "loss", "grad_norm", "total")
        }
        norm = record.get("grad_norm")
        return DigestLine(
            int(str(record["step"])), float(str(record["loss"])), None if norm is None else float(str(norm)), digests
        )
    except (KeyError, ValueError):
        return None


def _exact(value: float | None) -> float | str | None:
    if value is None or json.dumps(value) not in ("NaN", "Infinity", "-Infinity"):
        return value
    return str(value)


# The table of all ranks

OWN = "own"
"""Kind of tensors that differ from rank to rank."""
OF_EACH_RANK = ("buffers", "ema.buffers")
"""Columns of buffers, to which a forward may write on each rank by itself: those of the first rank count, and they are not compared."""
_HALF = 1 << 32
_WORD = 1 << 64

Kinds = Mapping[str, tuple[int, ...]]
"""How a rank holds tensors, by kind, such as `shard` for those divided over this axis: which part it has. Equal parts are copies."""


@dataclass(frozen=True)
class Drift:
    """A column in which ranks that hold copies differ."""

    kind: str
    column: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]


class DigestTable:
    """Places the digests of each rank in the vector that is summed over the ranks, and reads the sum.

    Every rank fills its own place and leaves zeros in those of others, so that a sum over the ranks has all of them. A digest of 64 bits
    goes as two numbers of 32 bits, which float64 holds exactly.
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
        """Return the vector to be summed over the ranks."""
        whole = torch.zeros((len(self.ranks), 2, self.width), dtype=torch.float64, device=cells.device)
        whole[rank, 0] = (cells & (_HALF - 1)).double()
        whole[rank, 1] = ((cells >> 32) & (_HALF - 1)).double()
        return whole.reshape(-1)

    def unpacked(self, sums: Sequence[float]) -> list[list[int]]:
        """Return the cells of each rank, as integers from 0 to 2^64 - 1."""
        size = 2 * self.width
        rows = [sums[start : start + size] for start in range(0, size * len(self.ranks), size)]
        return [
            [int(low) + _HALF * int(high) for low, high in zip(row[: self.width], row[self.width :])] for row in rows
        ]

    def totals(self, rows: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the digest of each column over all ranks, in which each part counts once; `samples` is one of them."""
        sums = dict.fromkeys(self.columns, 0)
        for kind in self.kinds:
            for holders in self._holders(kind).values():
                for column in self.columns:
                    sums[column] += rows[holders[0]][self.place(kind, column)]
        sums["samples"] = sum(row[-1] for row in rows)
        return {column: value % _WORD for column, value in sums.items()}

    def drifted(self, rows: Sequence[Sequence[int]]) -> list[Drift]:
        """Return where ranks differ that hold copies, the first column first."""
        found = []
        compared = [column for column in self.columns if column not in OF_EACH_RANK]
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
