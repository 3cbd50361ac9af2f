"""G19: random faults at any statement and instant on 2 to 5 ranks; each job ends in the state of one process that nothing disturbed.

`make chaos-elastic N=200` makes so many faults or more; here it is one job. CHAOS_SEED begins elsewhere. In a third of the jobs the state
of the optimizer is in parts, and ranks end one at a time.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.chaos import SEED, report, share

from . import training
from .storm import Gusts
from .supervised import Ended, run_ranks
from .wire import Wire

_STEPS = 250
_SETTINGS: dict[str, dict[str, Any]] = {
    "mlp": {"steps": _STEPS},
    "gpt": {"steps": _STEPS, "patience": 15, "optim": {"type": "adamw", "lr": 3e-2}},
    "async": {"steps": _STEPS, "checkpoint": {"interval": 5, "async_enabled": True}},
}


@dataclass
class Undisturbed:
    """What one process without faults ends in."""

    digest: str
    saved: str
    metrics: list[tuple[int, str, float]]


@dataclass
class Figures:
    """What is counted over all jobs."""

    jobs: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    changes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    gaps: list[float] = field(default_factory=list)

    def add(self, ended: Ended) -> None:
        """Count one start of a job."""
        for each in ended.notes:
            if "struck" in each:
                self.faults[each["how"]] += 1
                self.places[each["where"]] += 1
        self.gaps += ended.gaps

    def add_changes(self, name: str, directory: Path) -> None:
        """Count what a job has written of its changes."""
        records = [each for each in _records(directory) if "elastic/ranks" in each]
        self.jobs[name] += 1
        self.changes += len(records)
        self.repeated += sum(int(each["elastic/repeated"]) for each in records)

    def __str__(self) -> str:
        ordered = sorted(self.gaps) or [0.0]
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        middle, highest, longest = (
            1000 * value for value in (statistics.median(ordered), p99, ordered[-1])
        )
        return (
            f"{self.faults.total()} faults ({dict(self.faults)}) at {len(self.places)} places in {self.jobs.total()} jobs "
            f"({dict(self.jobs)}), "
            f"{self.changes} changes, {self.repeated} updates repeated, 0 lost; gap of {len(ordered)} deaths: median "
            f"{middle:.0f} ms, p99 {highest:.0f} ms, largest {longest:.0f} ms"
        )


def _records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def _metrics(directory: Path) -> list[tuple[int, str, float]]:
    """Return each loss in metrics.jsonl."""
    names = ("train/loss", "val/loss")
    return [
        (each["step"], name, each[name])
        for each in _records(directory)
        for name in names
        if name in each
    ]


def _saved(directory: Path) -> str:
    return training.digest_of_file(directory / "checkpoints" / "latest.pth")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    found = {}
    for name, settings in _SETTINGS.items():
        root = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MODEL", name)
            digest, _ = training.train(str(root), **settings, dir=str(root / "run"))
        found[name] = Undisturbed(digest, _saved(root / "run"), _metrics(root / "run"))
    return found


def _has_shards(seed: str) -> bool:
    return random.Random(f"shards/{seed}").random() < 1 / 3


def _job(seed: str, directory: Path) -> tuple[str, str, list[Ended]]:
    """Run one job to its end, through deaths of its agent; return its model, a description, and how its starts ended."""
    choices, shards = random.Random(seed), _has_shards(seed)
    ranks, name = choices.choice((2, 3, 3, 4, 5)), choices.choice(list(_SETTINGS))
    lost = choices.choice((0.0, 0.0, 0.1))
    ends_agent = choices.random() < 0.2
    variables = {
        "STORM_RATE": "0.1",
        "MODEL": name,
        "ROOT": str(directory),
        "SETTINGS": json.dumps({**_SETTINGS[name], "auto_resume": True}),
        "ELASTIC": json.dumps({"fence_seconds": 0.4, "shard_state": shards}),
        **({"STORM_ALONE": "1"} if shards else {}),
    }
    found = []
    for start in range(3):
        notes, alive = directory / f"report-{start}", str(directory / f"alive-{start}")
        variables |= {"STORM": f"{seed}/{start}", "ALIVE": alive}
        ended = run_ranks(
            training.elastic_rank,
            ranks,
            notes,
            variables=variables,
            timeout=300.0,
            continue_after=lambda: choices.uniform(0, 0.8),
            disturb=Gusts(f"{seed}/{start}", alive, notes, mean_seconds=3.0, alone=shards),
            wire=Wire(f"{seed}/{start}", lost=lost) if lost else None,
            asks_for_stacks=True,
            end_agent_after=choices.uniform(1, 6) if ends_agent and start < 2 else None,
        )
        found.append(ended)
        if not ended.lost_agent:
            break
    what = f"seed {seed!r}: {name}{' with shards' * shards} on {ranks} ranks"
    return name, f"{what}, {3 * lost:.0%} of the messages lost, late or twice", found


@pytest.mark.timeout(7200)
def test_random_faults_end_as_if_undisturbed(
    undisturbed: dict[str, Undisturbed], tmp_path: Path
) -> None:
    wanted, figures = share(1.0, otherwise=3), Figures()
    while figures.faults.total() < wanted:
        seed = f"{SEED}/{figures.jobs.total()}"
        directory, shards = tmp_path / str(figures.jobs.total()), _has_shards(seed)
        directory.mkdir()
        name, what, starts = _job(seed, directory)
        for ended in starts:
            assert not ended.verdict, f"{what}: {ended.verdict}"
            assert not [note for note in ended.notes if "lost" in note], what
            for note in ended.notes:
                assert "end" not in note or note["repeated"] <= len(note["changes"]), what
            figures.add(ended)
        figures.add_changes(f"{name} with shards" if shards else name, directory / "run")
        hashes = starts[-1].hashes
        # A rank has its own parts of what is in shards.
        assert len(hashes) == 1 if shards else hashes == {undisturbed[name].digest}, (
            f"{what}: {hashes}, exit codes {starts[-1].codes}"
        )
        assert _saved(directory / "run") == undisturbed[name].saved, what
        assert _metrics(directory / "run") == undisturbed[name].metrics, what
        print(figures, flush=True)
    report(f"elastic ranks, {figures}", figures.faults.total(), figures.jobs.total())
