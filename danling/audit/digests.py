"""Digests of updates: the file of a run, the digests of all ranks in one table, and the observer that computes them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from danling.distributed import HostCopy, ReplicaDriftError
from danling.optim.state import to_inner_tensors
from danling.reporting.jsonl import JsonLines, bounded_lines, read_jsonl
from danling.utils.devices import sent
from danling.utils.files import open_file
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name
from danling.utils.trees import dotted, tensors

from .hashing import Hasher, key_of

if TYPE_CHECKING:
    from contextlib import ExitStack

    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome

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


class DigestFile(JsonLines):
    """Writes the digests of a run; what an earlier attempt wrote after the step that the run resumes from is cut off."""

    def add(self, line: DigestLine) -> None:
        """Append a line; floats are written so that they are read back exactly, those that are not finite as texts."""
        values = {"step": line.step, "loss": _exact(line.loss), "grad_norm": _exact(line.grad_norm)}
        digests = {name: f"{value:016x}" for name, value in line.digests.items()}
        self.write({**values, "total": f"{line.total:016x}", **digests})


def read_digests(
    run: str | os.PathLike[str], problems: list[str] | None = None
) -> dict[int, DigestLine]:
    """Return the digests of a run by step; empty where it has none."""
    file = Path(run, FILE)
    if not file.is_file():
        return {}
    found = [line for line in map(_line, read_jsonl(file)) if line is not None]
    # `read_jsonl` leaves out lines without a word: a comparison says how many are missing.
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
            int(str(record["step"])),
            float(str(record["loss"])),
            None if norm is None else float(str(norm)),
            digests,
        )
    except (KeyError, ValueError):
        return None


def _exact(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


# The table of all ranks

OWN = "own"
"""Kind of tensors that differ from rank to rank."""
OF_EACH_RANK = ("buffers", "ema.buffers")
"""Columns of buffers, to which a forward may write on each rank by itself: those of the first rank count, and they are not compared."""
_HALF = 1 << 32
_WORD = 1 << 64

Kinds = Mapping[str, tuple[int, ...]]
"""How a rank holds tensors, by kind, such as `shard` for those divided over this axis: which part it has. Equal parts are copies."""


class Drift(NamedTuple):
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
        self.size = len(ranks)
        self.holders: dict[str, dict[tuple[int, ...], list[int]]] = {}
        """By kind and part: the ranks that hold it."""
        for kind in sorted({kind for held in ranks for kind in held}):
            parts = self.holders[kind] = {}
            for rank, held in enumerate(ranks):
                if kind in held:
                    parts.setdefault(held[kind], []).append(rank)
        cells = [(kind, column) for kind in self.holders for column in self.columns]
        self.places = {cell: place for place, cell in enumerate(cells)}
        """By kind and column: the place of a cell among those of its rank. The last one, which has no kind, is that of the samples."""
        self.width = len(cells) + 1

    def packed(self, cells: Tensor, rank: int) -> Tensor:
        """Return the vector to be summed over the ranks."""
        # Of negative integers too, `&` and `>>` give the bits of the two's complement.
        whole = torch.zeros((self.size, 2, self.width), dtype=torch.float64, device=cells.device)
        whole[rank, 0] = (cells & (_HALF - 1)).double()
        whole[rank, 1] = ((cells >> 32) & (_HALF - 1)).double()
        return whole.reshape(-1)

    def unpacked(self, sums: Sequence[float]) -> list[list[int]]:
        """Return the cells of each rank, as integers from 0 to 2^64 - 1."""
        rows = [
            sums[2 * self.width * rank : 2 * self.width * (rank + 1)] for rank in range(self.size)
        ]
        return [
            [int(low) + _HALF * int(high) for low, high in zip(row, row[self.width :])]
            for row in rows
        ]

    def totals(self, rows: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return the digest of each column over all ranks, in which each part counts once; `samples` is one of them."""
        sums = dict.fromkeys(self.columns, 0)
        for (kind, column), place in self.places.items():
            sums[column] += sum(rows[ranks[0]][place] for ranks in self.holders[kind].values())
        sums["samples"] = sum(row[-1] for row in rows)
        return {column: value % _WORD for column, value in sums.items()}

    def drift(self, rows: Sequence[Sequence[int]]) -> Drift | None:
        """Return where ranks differ that hold copies, in the first column in which they do."""
        cells = [(column, kind) for column in self.columns for kind in self.holders]
        for column, kind in cells:
            if column in OF_EACH_RANK or kind == OWN:
                continue
            for ranks in self.holders[kind].values():
                values = {rank: rows[rank][self.places[kind, column]] for rank in ranks}
                value, number = Counter(values.values()).most_common(1)[0]
                if number < len(ranks):
                    # Without a majority, nothing tells which copy is right: the first one counts.
                    usual = value if 2 * number > len(ranks) else values[ranks[0]]
                    odd = tuple(rank for rank in ranks if values[rank] != usual)
                    return Drift(
                        kind, column, odd, tuple(rank for rank in ranks if rank not in odd)
                    )
        return None


# The digests of a training


class Entry(NamedTuple):
    """A tensor of a run as this rank has it: the column of its digest, its name, and whether other ranks may have copies of it."""

    column: str
    name: str
    tensor: Tensor
    is_shared: bool = True


def entries(runner: TorchRunner) -> Iterator[Entry]:
    """Yield the tensors of a run as this rank has them; their order may be another one on each rank."""
    named = list(runner.named_parameters())
    names: dict[int, str] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), name)
    grouped: set[int] = set()
    optimizer: Any = runner.optimizer
    state = getattr(optimizer, "state", {})
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        for number, parameter in enumerate(group["params"]):
            # A parameter that is not the model's, such as one of a criterion: each rank has its own.
            shared = id(parameter) in names
            grouped.add(id(parameter))
            name = names.get(id(parameter), f"group.{index}.{number}")
            yield Entry(f"weights.{index}", name, parameter, shared)
            for key, value in sorted(
                state.get(parameter, {}).items(), key=lambda item: str(item[0])
            ):
                for path, tensor in tensors(value, opened=to_inner_tensors):
                    yield Entry(
                        f"optimizer.{index}", dotted((f"{name}/{key}", *path)), tensor, shared
                    )
    for name, parameter in named:
        if id(parameter) not in grouped:
            grouped.add(id(parameter))
            yield Entry("weights.rest", name, parameter)
    buffers = {
        canonical_name(name): buffer for name, buffer in runner.unwrapped_model.named_buffers()
    }
    if isinstance(runner.criterion, nn.Module):
        buffers |= {
            f"criterion.{name}": buffer for name, buffer in runner.criterion.named_buffers()
        }
    for name, tensor in buffers.items():
        yield Entry("buffers", name, tensor)
    for name, tensor in runner.ema.weights.items() if runner.ema is not None else ():
        yield Entry("ema.buffers" if name in buffers else "ema", name, tensor)


@dataclass
class _Taken:
    """Digests of an update that the ranks have not compared yet: those of cells, and by kind, column and name those of tensors."""

    step: int
    cells: Tensor
    tensors: list[tuple[str, str, str]]
    digests: Tensor
    figures: Tensor
    has_norm: bool


class UpdateAudit(Observer):
    """Digests the state after every so many updates, on the device, without waiting for it.

    What was computed travels with the collective that the next update makes anyway, and is read one update later still on an accelerator;
    before anything is evaluated or saved it is compared at once, in its own collective.
    """

    critical = True

    def __init__(self, runner: TorchRunner, every: int, closers: ExitStack) -> None:
        self.every = every
        self._runner = runner
        self._closers = closers
        self._domain = runner.placement.optimizer
        self._device = runner.device
        self._file: DigestFile | None = None
        self._began_at = 0
        self._hasher = Hasher(self._device)
        self._samples: Tensor | None = None
        self._table: DigestTable | None = None
        self._groups: set[str] = set()
        self._waiting: _Taken | None = None
        self._sent: _Taken | None = None
        self._landed: tuple[_Taken, HostCopy] | None = None

    # Within an update

    def training_started(self) -> None:
        """Note where the run begins. No communication."""
        if self._table is None:
            self._began_at = self._runner.state.train.global_step

    def update_started(self) -> None:
        """Forget the samples of the update before."""
        self._samples = None

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        """Take in the samples of a micro-batch, where its update is digested. No communication."""
        if (
            self._runner.placement.counts_samples
            and (self._runner.state.train.global_step + 1) % self.every == 0
        ):
            # Added, so that the division into micro-batches does not matter.
            found = self._hasher.digest_samples(data)
            self._samples = found if self._samples is None else self._samples + found

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """Digest the state after an update, where that is due. Called on all ranks."""
        self._read_landed()
        if outcome.committed and self._runner.state.train.global_step % self.every == 0:
            self.results_needed()
            self._waiting = self._take(outcome)
            # A rank by itself makes no collective with which it could travel.
            if self._domain.size == 1:
                values = self.values()
                assert values is not None
                self.take(values)

    def _take(self, outcome: UpdateOutcome) -> _Taken:
        found, held_part = list(entries(self._runner)), self._runner.preparation.held_part
        kinds = [
            held_part(entry.tensor) if entry.is_shared else (OWN, (self._domain.rank,))
            for entry in found
        ]
        groups = {entry.column for entry in found if entry.column.startswith("weights.")}
        table = self._table
        if table is None or not groups <= self._groups:
            # At the first digest, and where parameter groups were added.
            told = self._domain.gather_objects((groups, {OWN: (self._domain.rank,), **dict(kinds)}))
            self._groups = set().union(*(groups for groups, _ in told))
            # `weights.10` comes after `weights.9`, and `weights.rest` last: the same on all ranks.
            numbered = sorted(self._groups, key=lambda name: (len(name), name))
            states = [
                name.replace("weights.", "optimizer.", 1)
                for name in numbered
                if name != "weights.rest"
            ]
            table = self._table = DigestTable(
                [*numbered, *states, "ema", *OF_EACH_RANK], [kinds for _, kinds in told]
            )
        tensors = [
            (kind if kind in table.holders else OWN, entry.column, entry.name)
            for (kind, _), entry in zip(kinds, found)
        ]
        digests = self._together([self._hasher.digest(entry.tensor) for entry in found])
        cells = torch.zeros(table.width, dtype=torch.int64, device=self._device)
        if found:
            keys = [
                key_of(entry.name, str(entry.tensor.dtype), tuple(entry.tensor.shape))
                for entry in found
            ]
            places = self._on_device([table.places[kind, column] for kind, column, _ in tensors])
            cells.index_add_(0, places, digests * self._on_device(keys))
        if self._samples is not None:
            cells[-1] = self._samples
        norm = outcome.grad_norm
        pair = [outcome.loss, 0.0 if norm is None else norm]
        figures = torch.stack(
            [torch.as_tensor(x, dtype=torch.float64, device=self._device).detach() for x in pair]
        )
        return _Taken(
            self._runner.state.train.global_step, cells, tensors, digests, figures, norm is not None
        )

    def _together(self, values: Sequence[Tensor]) -> Tensor:
        """Return single digests as one tensor on the device; those of tensors in host memory, such as counts of steps, go there at once."""
        stacked = torch.zeros(len(values), dtype=torch.int64, device=self._device)
        for device in {value.device for value in values}:
            here = [index for index, value in enumerate(values) if value.device == device]
            found = sent(torch.stack([values[index] for index in here]), self._device)
            stacked = stacked.index_copy(0, self._on_device(here), found)
        return stacked

    def _on_device(self, values: Sequence[int]) -> Tensor:
        return sent(torch.tensor(values, dtype=torch.int64), self._device)

    # What travels with the collective of an update

    def values(self) -> Tensor | None:
        """Return the vector to sum over the ranks with the collective of this update, float64; `None` where nothing waits."""
        self._sent, self._waiting = self._waiting, None
        if self._sent is None or self._table is None:
            return None
        return self._table.packed(self._sent.cells, self._domain.rank)

    def take(self, sums: Tensor) -> None:
        """Take the sum over the ranks of what `values` returned. Called on all ranks."""
        taken, self._sent = self._sent, None
        assert taken is not None
        self._landed = taken, HostCopy(torch.cat([sums.to(self._device), taken.figures]))
        if self._device.type == "cpu":
            self._read_landed()

    def results_needed(self) -> None:
        """Compare what has not been compared yet. Called on all ranks, before anything is evaluated or saved."""
        self._read_landed()
        values = self.values()
        if values is not None:
            self.take(self._domain.all_reduce(values))
            self._read_landed()

    def _read_landed(self) -> None:
        """Write the line of an update that has landed, or raise the error of copies that differ. Called on all ranks."""
        landed, self._landed = self._landed, None
        if landed is None or self._table is None:
            return
        taken, numbers = landed
        *sums, loss, norm = numbers.read()
        rows = self._table.unpacked(sums)
        drift = self._table.drift(rows)
        if drift is not None:
            raise self._error(taken, drift)
        if self._domain.rank == 0:
            if self._file is None:
                self._file = DigestFile(
                    self._runner.workspace.digests_file, resume_step=self._began_at
                )
                self._closers.callback(self._file.close)
            # A column without tensors has no digest.
            totals = self._table.totals(rows)
            shown = {name: value for name, value in totals.items() if value or name == "samples"}
            self._file.add(DigestLine(taken.step, loss, norm if taken.has_norm else None, shown))

    def _error(self, taken: _Taken, drift: Drift) -> ReplicaDriftError:
        """Return the error that names the ranks and the first tensor. Called on all ranks: they exchange the digests of single tensors."""
        found = zip(taken.tensors, taken.digests.tolist())
        told = self._domain.gather_objects(
            {t[2]: d for t, d in found if t[:2] == (drift.kind, drift.column)}
        )
        right, wrong = told[drift.others[0]], told[drift.ranks[0]]
        known = {**right, **wrong}
        names = [name for name in known if wrong.get(name) != right.get(name)] or ["its kind"]
        ranks, others = (
            f"rank {found[0]}" if len(found) == 1 else f"ranks {list(found)}"
            for found in (drift.ranks, drift.others)
        )
        unsure = (
            " Two copies do not show which one is wrong."
            if len(drift.others) == len(drift.ranks) == 1
            else ""
        )
        return ReplicaDriftError(
            f"Expected equal values on ranks that have copies of a tensor after update {taken.step}. Received: {ranks} differs from "
            f"{others} in {names[0]!r} and {len(names) - 1} more of {len(known)} in {drift.column!r}.{unsure} No checkpoint of this "
            "state was published. Check the machine of that rank, and code that writes to weights on one rank alone; continue "
            "with auto_resume."
        )
