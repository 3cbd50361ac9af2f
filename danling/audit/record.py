"""The file of digests of a run, one JSON object a line, beside its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from danling.reporting.trackers import JsonLines, bounded_lines, read_jsonl
from danling.utils.files import open_file

FILE = "digests.jsonl"
"""Its name in the run directory."""


@dataclass(frozen=True)
class DigestLine:
    """The digests of one update.

    Attributes:
        step: Updates committed.
        loss: Mean loss of the update.
        grad_norm: Norm of its gradient before clipping.
        digests: By column: `samples` of the update; weights, optimizer state, averages and buffers after it.
    """

    step: int
    loss: float
    grad_norm: float | None
    digests: Mapping[str, int]

    @property
    def total(self) -> int:
        """One digest of all of them but the samples, and but what ranks write by themselves."""
        return sum(value for name, value in self.digests.items() if name != "samples") % (1 << 64)


class DigestFile:
    """Writes the digests of a run; what an earlier attempt wrote after the step that the run resumes from is cut off.

    Args:
        file: The file.
        resume_step: Updates committed where this attempt begins.
    """

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
    """Return the digests of a run by step; empty where it has none.

    Args:
        run: The run directory.
        problems: Takes a sentence where lines are damaged, which are left out; one that a kill left unfinished is not.
    """
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
