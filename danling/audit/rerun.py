"""Trains a stretch of a run again, by the user's own program, and compares the end with the checkpoint that the run has there."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from danling.checkpoints.reading import locate, read_payload
from danling.prove.program import announce, run_program, scratch_settings
from danling.reporting.progress import format_duration
from danling.training.keys import preserved_streams
from danling.workspace.run_directory import is_in_use
from danling.workspace.runs import Run, is_run

from .digests import read_digests
from .divergence import Comparison, compare_runs

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


class ProgramFailed(ValueError):
    """The program did not reach the end of the stretch."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint of a run."""

    path: Path
    step: int
    epoch: int


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


@dataclass(frozen=True)
class AuditResult:
    """What came of training a stretch of a run again.

    Attributes:
        start: The checkpoint that it was begun from; `None` where it was begun from scratch.
        end: The checkpoint that the end was compared with.
        differences: Entries that differ between the checkpoints, and by how much.
        comparison: The run compared with the stretch that was trained again: settings, environments, figures.
        ranks: How many ranks made the stored checkpoint, and the other one.
        failed: How the program failed after the stretch, such as without a checkpoint of the run that is not there; `None` where it
            ended well.
    """

    start: Stored | None
    end: Stored
    differences: Sequence[Difference]
    comparison: Comparison
    ranks: tuple[int, int]
    failed: str | None = None

    @property
    def differing(self) -> list[str]:
        """Paths of entries that differ between the checkpoints, such as `model/0.weight`."""
        return [found.path for found in self.differences]

    @property
    def is_same(self) -> bool:
        """Whether the end is bitwise the stored one, and all figures on the way are."""
        return not self.differences and not self.comparison.divergences

    def beyond(self, tolerance: float) -> list[str]:
        """Return what differs by more than a share of the stored value: losses, metrics, entries by the norm of each tensor.

        Samples, counters and all that has no such share must be the same. Entries that a checkpoint has for each rank are left out
        where the number of ranks is another one, and how an optimizer computes and names its parameters always is.
        """
        shares: dict[str, float | None] = {}
        for found in self.differences:
            parts = found.path.split("/")
            if parts[:2] == ["optimizer", "param_groups"] and _OF_IMPLEMENTATION.intersection(
                parts[2:]
            ):
                continue
            if self.ranks[0] == self.ranks[1] or not f"{found.path}/".startswith(_OF_RANKS):
                shares[found.path] = found.share
        shares |= self.comparison.shares
        samples = [
            divergence.figure
            for divergence in self.comparison.divergences
            if divergence.figure == "samples"
        ]
        return samples + [
            name for name, share in shares.items() if share is None or not share <= tolerance
        ]


# The stretch


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
    found: dict[tuple[int, int], Stored] = {}
    # A history name first, which stays, where both lead to the same save.
    for path in [
        *sorted((run / "checkpoints").glob("ckpt-*")),
        *sorted((run / "checkpoints").glob("latest*")),
    ]:
        if path.suffix in ("", ".pth"):
            store, place = locate(path)
            record = store.record(place)
            found.setdefault(
                (record.step, record.epoch), Stored(path.absolute(), record.step, record.epoch)
            )
    if not found:
        raise FileNotFoundError(
            f"Expected checkpoints in {str(run / 'checkpoints')!r}. Received: none. Audit a run that has saved."
        )
    return [found[position] for position in sorted(found)]


def stretch_of(
    stored: Sequence[Stored], start: int | None, end: int | None
) -> tuple[Stored | None, Stored]:
    """Return the checkpoints between which a run is trained again."""
    by_step = {each.step: each for each in stored}
    for step in (end, start or None):
        if step is not None and step not in by_step:
            raise ValueError(
                f"Expected an update at which the run has a checkpoint: {sorted(by_step)}. Received: {step}. Name one of them, or 0 to "
                "begin from scratch."
            )
    last = stored[-1] if end is None else by_step[end]
    # From the checkpoint before it, or from scratch.
    if start is None:
        start = max((step for step in by_step if step < last.step), default=0)
    if start >= last.step:
        raise ValueError(f"Expected FROM before TO. Received: {start}..{last.step}. Exchange them.")
    return by_step.get(start), last


class Retraining:
    """A stretch of a run that is trained again in its own directory."""

    def __init__(
        self, run: Path, scratch: Path, start: int | None, end: int | None, *, is_ours: bool = False
    ) -> None:
        self.run = run
        self.directory = scratch.absolute() / "run"
        self.start, self.end = stretch_of(checkpoints_of(run, is_ours=is_ours), start, end)
        config = Run(run, "stored").config
        self.settings: dict[str, object] = {
            **scratch_settings(self.directory),
            "resume": None if self.start is None else os.fspath(self.start.path),
            "audit.until": [self.end.step, self.end.epoch],
            "audit.digest_interval": config.get("audit.digest_interval")
            or (None if read_digests(run) else 1),
            "checkpoint.keep_latest_k": 0,
        }
        # Also one that was drawn, which no setting of the program has.
        if config.get("seed") is not None:
            self.settings["seed"] = config["seed"]

    def reached(self) -> Stored | None:
        """Return the checkpoint at the end of what was trained again; `None` where there is none."""
        # While the program runs, its last save may be under way.
        has_saved = is_run(self.directory) and any((self.directory / "checkpoints").glob("latest*"))
        made = checkpoints_of(self.directory) if has_saved and not is_in_use(self.directory) else []
        return next((m for m in made if (m.step, m.epoch) == (self.end.step, self.end.epoch)), None)

    def result(self, failed: str | None = None) -> AuditResult:
        """Compare the end with the stored one."""
        reached = self.reached()
        if reached is None:
            raise ProgramFailed(
                f"Expected a training to update {self.end.step}, as that of the run. Received: no checkpoint there. Train with the "
                "settings of the run."
            )
        payloads = []
        for each in (self.end, reached):
            store, found = locate(each.path)
            store.verify(found, "full")
            payloads.append(read_payload(store.target(found)))
        stored, trained = payloads
        ranks = [int(payload["state"]["elastic"]["world_size"]) for payload in payloads]
        comparison = compare_runs(Run(self.run, "stored"), Run(self.directory, "audited"))
        differences = differences_of(stored, trained)
        return AuditResult(
            self.start, self.end, differences, comparison, (ranks[0], ranks[1]), failed
        )


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
    again, log = Retraining(run, scratch, start, end), scratch / "output.log"
    first, last = 0 if again.start is None else again.start.step, again.end.step
    records = [record for record in Run(run, "stored").records if first <= record["step"] <= last]
    times = [
        float(record["time"]) for record in records if isinstance(record.get("time"), (int, float))
    ]
    took = f", which took the run {format_duration(max(times) - min(times))}" if times else ""
    announce(
        f"1 of 2: the program trains updates {first + 1} to {last} again{took}; it prints to {log}"
    )
    ended = run_program(command, again.settings, log=log, timeout=timeout)
    has_reached = again.reached() is not None
    if ended.code is None or not has_reached:
        how = "no end in time" if ended.code is None else f"exit code {ended.code}"
        raise ProgramFailed(
            f"Expected the program to train to update {last}, as the run did, and to end. Received: {how}, and "
            f"{'a' if has_reached else 'no'} checkpoint there; the end of what it printed:\n{ended.tail}\nStart it with the settings of "
            "the run, as its first one; --scratch keeps all that it left."
        )
    announce(f"2 of 2: the checkpoint at update {last} is compared with the stored one")
    # What a program does after its training is not compared.
    return again.result(
        f"exit code {ended.code}, after:\n{ended.tail}" if ended.code != 0 else None
    )


def audit_runner(
    runner: TorchRunner,
    start: int | None,
    end: int | None,
    scratch: str | Path | None,
    *,
    is_training: bool,
) -> AuditResult:
    """Train a stretch of a runner's run again; see `TorchRunner.audit`."""
    world = runner.world
    if is_training:
        raise ValueError(
            "runner.audit() cannot be called during train(). Call it after train() returns."
        )
    runner.checkpoint_manager.wait()
    place = Path(scratch or world.on_first(lambda: tempfile.mkdtemp(prefix="danling-audit-")))
    try:
        run = runner.workspace.dir
        again = world.on_first(lambda: Retraining(run, place, start, end, is_ours=True))
        config = deepcopy(runner.config)
        for key, value in again.settings.items():
            config.set(key, value)
        # Training again must not change what the program draws next.
        with preserved_streams(runner.device), type(runner)(config) as trained:
            trained.train()
        world.barrier()
        return world.on_first(again.result)
    finally:
        if scratch is None:
            world.barrier()
            shutil.rmtree(place, ignore_errors=True)


# The contents of two checkpoints

_NOT_COMPARED = frozenset(
    {"runner", "format_version", "state/elastic", "state/attempts", "state/metrics_mark"}
)
"""What says by whom and how a checkpoint was made, and how long its run's `metrics.jsonl` was."""
_OF_RANKS = "state/train/weight_reference/"
"""Entries that a checkpoint has for each rank, which so differ where the number of ranks does."""
_OF_IMPLEMENTATION = frozenset(
    {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
)
"""How an optimizer computes and calls its parameters, which each layout does in its own way."""


def differences_of(stored: object, trained: object, path: str = "") -> list[Difference]:
    """Return what two checkpoints, or values in them, do not have bitwise alike."""
    if path in _NOT_COMPARED:
        return []
    if isinstance(stored, Mapping) and isinstance(trained, Mapping):
        found = [
            Difference(_below(path, key), None)
            for key in {**stored, **trained}
            if (key in stored) != (key in trained)
        ]
        for key in stored:
            if key in trained:
                found += differences_of(stored[key], trained[key], _below(path, key))
        return [each for each in found if each.path not in _NOT_COMPARED]
    if (
        isinstance(stored, (list, tuple))
        and isinstance(trained, (list, tuple))
        and len(stored) == len(trained)
    ):
        pairs = enumerate(zip(stored, trained))
        return [
            each for number, pair in pairs for each in differences_of(*pair, _below(path, number))
        ]
    if isinstance(stored, Tensor) and isinstance(trained, Tensor):
        is_same = stored.dtype == trained.dtype and stored.shape == trained.shape
        # Bits, since zeros of two signs are equal, and NaNs are not.
        is_same = is_same and torch.equal(
            *(t.contiguous().reshape(-1).view(torch.uint8) for t in (stored, trained))
        )
    else:
        is_same = bool(stored == trained or (stored != stored and trained != trained))
    return [] if is_same else [Difference(path, _share(stored, trained))]


def _below(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _share(first: Any, second: Any) -> float | None:
    """Return the norm of the difference as a share of that of the first value, in float64; see `Difference`."""
    if isinstance(first, float) and isinstance(second, (int, float)):
        first, second = (torch.tensor(value, dtype=torch.float64) for value in (first, second))
    # Of integers, such as counts, no difference is small.
    both = (first, second)
    if not all(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in both):
        return None
    if first.shape != second.shape:
        return None
    kind = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    before, after = (value.detach().to("cpu", kind) for value in both)
    whole = float(torch.linalg.vector_norm(before))
    apart = float(torch.linalg.vector_norm(after - before))
    # Such as zeros of two signs, whose bits differ.
    if apart == 0:
        return 0.0
    return apart / whole if whole else math.inf
