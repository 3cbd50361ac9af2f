"""Trains a stretch of a run again, by the user's own program, and compares the end with the checkpoint that the run has there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from danling.checkpoints.reading import locate, read_payload
from danling.reporting.progress import format_duration
from danling.training.keys import preserved_streams
from danling.workspace.run_directory import is_in_use
from danling.workspace.runs import Run, is_run

from .digests import read_digests
from .divergence import Comparison, compare_runs
from .program import announce, run_program, scratch_settings

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


@dataclass(frozen=True)
class Stored:
    """A checkpoint of a run."""

    path: Path
    step: int
    epoch: int


@dataclass(frozen=True)
class AuditResult:
    """What came of training a stretch of a run again.

    Attributes:
        start: The checkpoint that it was begun from; `None` where it was begun from scratch.
        end: The checkpoint that the end was compared with.
        differences: Entries that differ between the checkpoints, and by how much.
        comparison: The run compared with the stretch that was trained again: settings, environments, figures.
        ranks: How many ranks made the stored checkpoint, and the other one; `None` where it does not say.
        failed: How the program failed after the stretch, such as without a checkpoint of the run that is not there; `None` where it
            ended well.
    """

    start: Stored | None
    end: Stored
    differences: Sequence[Difference]
    comparison: Comparison
    ranks: tuple[int | None, int | None]
    failed: str | None = None

    @property
    def differing(self) -> list[str]:
        """Paths of entries that differ between the checkpoints, such as `model/0.weight`."""
        return [found.path for found in self.differences]

    @property
    def is_same(self) -> bool:
        """Whether the end is bitwise the stored one, and all figures on the way are."""
        return not self.differences and not self.comparison.divergences

    def is_within(self, tolerance: float) -> bool:
        """Return whether nothing differs by more than a share of the stored value: losses, metrics, the norm of each tensor.

        Samples, counters and all that has no such share must be the same. Entries that a checkpoint has for each rank are left out
        where the number of ranks is another one, and how an optimizer computes and names its parameters always is.
        """
        return not self.beyond(tolerance)

    def beyond(self, tolerance: float) -> list[str]:
        """Return what keeps the stretch from being within a tolerance: entries, losses and metrics; see `is_within`."""
        left_out = _OF_RANKS if self.ranks[0] != self.ranks[1] else ()
        shares: dict[str, float | None] = {}
        for found in self.differences:
            parts = found.path.split("/")
            is_implementation = parts[:2] == ["optimizer", "param_groups"] and _OF_IMPLEMENTATION.intersection(
                parts[2:]
            )
            if not is_implementation and not f"{found.path}/".startswith(left_out):
                shares[found.path] = found.share
        shares |= self.comparison.shares
        samples = [divergence.figure for divergence in self.comparison.divergences if divergence.figure == "samples"]
        return samples + [name for name, share in shares.items() if share is None or not share <= tolerance]


class ProgramFailed(ValueError):
    """The program did not reach the end of the stretch."""


def checkpoints_of(run: Path, *, is_ours: bool = False) -> list[Stored]:
    """Return the checkpoints of a run by position, the first one first."""
    if not is_run(run):
        raise FileNotFoundError(
            f"Expected a run directory. Received: {str(run)!r}, which is none. Name one of `danling runs`."
        )
    if not is_ours and is_in_use(run):
        raise ValueError(
            f"Expected a run that no process writes to. Received: {str(run)!r}, whose writer is running. Stop it, or wait for its end."
        )
    directory = run / "checkpoints"
    names = sorted(path.name for path in directory.glob("ckpt-*") if path.suffix in ("", ".pth"))
    found: dict[tuple[int, int], Stored] = {}
    for name in [*names, "latest", "latest.pth"]:
        path = directory / name
        if path.exists():
            store, place = locate(path)
            record = store.record(place)
            found.setdefault((record.step, record.epoch), Stored(path.absolute(), record.step, record.epoch))
    if not found:
        raise FileNotFoundError(
            f"Expected checkpoints in {str(directory)!r}. Received: none. Audit a run that has saved."
        )
    return [found[position] for position in sorted(found)]


def stretch_of(stored: Sequence[Stored], start: int | None, end: int | None) -> tuple[Stored | None, Stored]:
    """Return the checkpoints between which a run is trained again."""
    last = stored[-1] if end is None else _at(stored, end)
    earlier = [
        found for found in stored if (found.step, found.epoch) < (last.step, last.epoch) and found.step < last.step
    ]
    first = None if start == 0 else (earlier[-1] if earlier else None) if start is None else _at(stored, start)
    if first is not None and first.step >= last.step:
        raise ValueError(f"Expected FROM before TO. Received: {first.step}..{last.step}. Exchange them.")
    return first, last


def _at(stored: Sequence[Stored], step: int) -> Stored:
    found = [each for each in stored if each.step == step]
    if not found:
        raise ValueError(
            f"Expected an update at which the run has a checkpoint: {sorted({each.step for each in stored})}. Received: {step}. Name one "
            "of them, or 0 to begin from scratch."
        )
    return found[-1]


def audit_run(
    run: Path,
    command: Sequence[str],
    *,
    scratch: Path,
    start: int | None = None,
    end: int | None = None,
    timeout: float | None = None,
) -> AuditResult:
    """Train a stretch of a run again and compare its end with the stored one.

    The code is that of the program; nothing of a checkpoint is run. Nothing is written into the directory of the run.
    """
    again = Retraining.of(run, scratch, start=start, end=end)
    log = scratch / "output.log"
    first = 0 if again.start is None else again.start.step
    records = [record for record in Run(run, "stored").records if first <= record["step"] <= again.end.step]
    times = [float(record["time"]) for record in records if isinstance(record.get("time"), (int, float))]
    took = f", which took the run {format_duration(max(times) - min(times))}" if times else ""
    announce(f"1 of 2: the program trains updates {first + 1} to {again.end.step} again{took}; it prints to {log}")
    ended = run_program(command, again.settings, log=log, timeout=timeout)
    if ended.code is None or again.reached is None:
        how = "no end in time" if ended.code is None else f"exit code {ended.code}"
        there = "a checkpoint there" if again.reached is not None else "no checkpoint there"
        raise ProgramFailed(
            f"Expected the program to train to update {again.end.step}, as the run did, and to end. Received: {how}, and {there}; the end "
            f"of what it printed:\n{ended.tail}\nStart it with the settings of the run, as its first one; --scratch keeps all that it left."
        )
    # What a program does after its training is not compared.
    failed = f"exit code {ended.code}, after:\n{ended.tail}" if ended.code != 0 else None
    announce(f"2 of 2: the checkpoint at update {again.end.step} is compared with the stored one")
    return replace(again.result(), failed=failed)


@dataclass(frozen=True)
class Retraining:
    """A stretch of a run that is trained again in its own directory."""

    run: Path
    directory: Path
    start: Stored | None
    end: Stored
    settings: Mapping[str, object]

    @classmethod
    def of(cls, run: Path, scratch: Path, *, start: int | None, end: int | None, is_ours: bool = False) -> Retraining:
        """Return how a stretch is trained again."""
        first, last = stretch_of(checkpoints_of(run, is_ours=is_ours), start, end)
        of_run, directory = Run(run, "stored"), scratch.absolute() / "run"
        every = of_run.config.get("audit.digest_interval") or (None if read_digests(run) else 1)
        settings: dict[str, object] = {
            **scratch_settings(directory),
            "resume": None if first is None else os.fspath(first.path),
            "audit.until": [last.step, last.epoch],
            "audit.digest_interval": every,
            "checkpoint.keep_latest_k": 0,
        }
        if of_run.config.get("seed") is not None:
            settings["seed"] = of_run.config["seed"]
        return cls(run, directory, first, last, settings)

    @property
    def reached(self) -> Stored | None:
        """The checkpoint at the end of what was trained again; `None` where there is none."""
        has_saved = is_run(self.directory) and any((self.directory / "checkpoints").glob("latest*"))
        made = checkpoints_of(self.directory) if has_saved and not is_in_use(self.directory) else []
        return next((m for m in made[::-1] if (m.step, m.epoch) == (self.end.step, self.end.epoch)), None)

    def result(self) -> AuditResult:
        """Compare the end with the stored one."""
        reached = self.reached
        if reached is None:
            raise ProgramFailed(
                f"Expected a training to update {self.end.step}, as that of the run. Received: no checkpoint there. Train with the "
                "settings of the run."
            )
        stored, trained = (read_payload(_target(each.path)) for each in (self.end, reached))
        runs = Run(self.run, "stored"), Run(self.directory, "audited")
        return AuditResult(
            self.start,
            self.end,
            differences_of(stored, trained),
            compare_runs(*runs),
            (ranks_of(stored), ranks_of(trained)),
        )


def _target(path: Path) -> Path:
    store, found = locate(path)
    store.verify(found, "full")
    return store.target(found)


# The contents of two checkpoints

_NOT_COMPARED = frozenset({"runner", "format_version"})
_NOT_COMPARED_OF_STATE = frozenset({"elastic", "attempts"})
_OF_RANKS = ("state/rng/", "state/train/weight_reference/")
"""Entries that a checkpoint has for each rank, which so differ where the number of ranks does."""

_OF_IMPLEMENTATION = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
"""How an optimizer computes and calls its parameters, which each layout does in its own way."""


@dataclass(frozen=True)
class Difference:
    """An entry that two checkpoints do not have bitwise alike.

    Attributes:
        path: Where it is, such as `model/0.weight`.
        share: The norm of the difference as a share of that of the stored value, infinite where this is 0; `None` where an entry is missing
            or is nothing that has one, such as a text, integers, or tensors of two shapes.
    """

    path: str
    share: float | None


def differences_of(stored: Mapping[str, Any], trained: Mapping[str, Any]) -> list[Difference]:
    """Return what two checkpoints do not have bitwise alike, less what says by whom and how they were made."""
    return [Difference(path.lstrip("/"), share) for path, share in _found(_compared(stored), _compared(trained), "")]


def ranks_of(payload: Mapping[str, Any]) -> int | None:
    """Return how many ranks made a checkpoint, `None` where it does not say."""
    state = payload.get("state")
    elastic = state.get("elastic") if isinstance(state, Mapping) else None
    size = elastic.get("world_size") if isinstance(elastic, Mapping) else None
    return int(size) if size is not None else None


def share_of(first: Tensor, second: Tensor) -> float:
    """Return the norm of the difference of two tensors as a share of that of the first one, in float64; infinite where this is 0."""
    kind = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    before, after = (value.detach().to("cpu", kind) for value in (first, second))
    whole, apart = float(torch.linalg.vector_norm(before)), float(torch.linalg.vector_norm(after - before))
    return apart / whole if whole else float("inf") if apart else 0.0


def _compared(payload: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in payload.items() if name not in _NOT_COMPARED}
    state = kept.get("state")
    if isinstance(state, Mapping):
        kept["state"] = {name: value for name, value in state.items() if name not in _NOT_COMPARED_OF_STATE}
    return kept


def _found(first: Any, second: Any, path: str) -> Iterator[tuple[str, float | None]]:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if not _same_bits(first, second):
            is_measured = first.shape == second.shape and _has_fractions(first) and _has_fractions(second)
            yield path, share_of(first, second) if is_measured else None
    elif isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = [*first, *(key for key in second if key not in first)]
        for key in sorted(keys, key=lambda key: key in first and key in second):
            if key in first and key in second:
                yield from _found(first[key], second[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}", None
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second)):
            yield from _found(*pair, f"{path}/{number}")
    elif not (first == second or (first != first and second != second)):
        is_measured = isinstance(first, float) and isinstance(second, (int, float))
        values = [torch.tensor(each, dtype=torch.float64) for each in (first, second) if is_measured]
        yield path, share_of(*values) if is_measured else None


def _has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Zeros of two signs are equal, and NaNs are not.
    return torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )


# From within the program


def audit_runner(runner: TorchRunner, start: int | None, end: int | None, scratch: str | Path | None) -> AuditResult:
    """Train a stretch of a runner's run again; see `TorchRunner.audit`."""
    world = runner.world
    if runner._session.running:
        raise ValueError("runner.audit() cannot be called during train(). Call it after train() returns.")
    runner.checkpoint_manager.wait()
    place = Path(scratch or world.on_first(lambda: tempfile.mkdtemp(prefix="danling-audit-")))
    try:
        run = runner.workspace.dir
        again = world.on_first(lambda: Retraining.of(run, place, start=start, end=end, is_ours=True))
        config = deepcopy(runner.config)
        for key, value in again.settings.items():
            config.set(key, value)
        with preserved_streams(runner.device), type(runner)(config) as trained:
            trained.train()
        world.barrier()
        return world.on_first(again.result)
    finally:
        if scratch is None:
            world.barrier()
            shutil.rmtree(place, ignore_errors=True)
