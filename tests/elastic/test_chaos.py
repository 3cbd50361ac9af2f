"""G19: random faults at random points on 2 to 4 ranks; each job ends in the state of one process that nothing disturbed.

`make chaos-elastic N=200` makes that many faults; here it is one job.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

from support.chaos import SEED, report, share

from . import training
from .supervised import run_ranks
from .test_ranks import _steps

_POINTS = ("update", "leaf", "reduced", "stepped", "evaluating", "save", "saved")
_HOW = ("kill", "kill", "kill", "stop", "exit", "raise")
_STEPS = 250
_SETTINGS = {"steps": _STEPS}


def _faults(choices: random.Random, ranks: int) -> str:
    """Return faults of all members but one, the first ones and the replacements."""
    spared = choices.randrange(ranks)
    found = []
    for member in range(ranks + 4):
        if member == spared:
            continue
        is_first = member < ranks
        point = choices.choice(_POINTS if is_first or choices.random() < 0.8 else ("born",))
        often = {"update": 60, "leaf": 60, "reduced": 60, "stepped": 60, "born": 1}.get(point, 6)
        found.append(f"{member}:{point}:{choices.randint(1, often)}:{choices.choice(_HOW)}")
    return ";".join(found)


def test_random_faults_end_as_if_undisturbed(tmp_path: Path) -> None:
    undisturbed, _ = training.train(str(tmp_path / "alone"), **_SETTINGS)
    choices, wanted = random.Random(SEED), share(1.0, otherwise=3)
    struck, jobs, repeated, gaps = 0, 0, 0, list[float]()
    while struck < wanted:
        directory = tmp_path / str(jobs)
        directory.mkdir()
        ranks, drop = choices.choice((2, 3, 4)), choices.choice((0.0, 0.0, 0.3))
        faults = _faults(choices, ranks)
        variables = {
            "FAULTS": faults,
            "ROOT": str(directory),
            "SETTINGS": json.dumps(_SETTINGS),
            "ELASTIC": json.dumps({"fence_seconds": 0.3}),
            "DANLING_ELASTIC_DROP": str(drop),
        }
        ended = run_ranks(training.elastic_rank, ranks, directory / "report", variables=variables)
        what = f"job {jobs} on {ranks} ranks, {drop:.0%} of the messages lost: {faults}"
        assert not ended.verdict, f"{what}: {ended.verdict}"
        assert ended.hashes == {undisturbed}, f"{what}: {ended.hashes}"
        assert _steps(directory, "train/loss") == list(range(1, _STEPS + 1)), what
        assert _steps(directory, "val/loss") == list(range(10, _STEPS + 1, 10)), what
        of_job = [note for note in ended.notes if "struck" in note]
        for note in ended.notes:
            assert "end" not in note or note["repeated"] <= len(note["changes"]), what
        struck, jobs = struck + len(of_job), jobs + 1
        repeated += ended.repeated
        gaps += [gap for gap, note in zip(ended.gaps, of_job) if gap and note["how"] in ("kill", "exit")]
    ordered = sorted(gaps)
    middle = 1000 * statistics.median(ordered)
    highest = 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(
        f"{struck} faults in {jobs} jobs, {repeated} updates repeated; gap: median {middle:.0f} ms, p99 {highest:.0f} ms, largest "
        f"{1000 * ordered[-1]:.0f} ms"
    )
    report(f"elastic ranks, median gap {middle:.0f} ms, p99 {highest:.0f} ms", struck, jobs)
