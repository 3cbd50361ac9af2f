"""trackio: a run of a local database for all attempts of a run, read back by trackio itself.

Library: trackio
Works: `trackio.enabled=true`, into a local database; a run that the program has opened itself
Exact: every step of a curve once after a kill and a resume
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.toys import Small, settings
from support.tracked import tracked

from danling.reporting import read_jsonl
from danling.reporting.trackers import TrackioTracker


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # It looks once where its directory is.
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    yield SQLiteStorage
    del os.environ["TRACKIO_DIR"]


def curve_of(records: list[dict[str, Any]], name: str = "train/loss") -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def test_a_database_has_every_step_once(store: Any) -> None:
    config: dict[str, Any] = {"trackio": {"project": "direct"}, "optim": {"lr": 0.1}}
    first = TrackioTracker(tracked(**config))
    run = first.run.id
    for step in range(1, 6):
        first.log({"train/loss": 1 / step, "val/acc": math.nan}, step)
    first.log({"val/loss": 2.0}, 2)
    first.flush()
    assert len(store.get_logs("direct", run_id=run)) == 6  # what a killed process leaves
    first.close()
    first.close()
    resumed = TrackioTracker(tracked(step=3, **config))
    assert resumed.run.id == run
    for step in range(3, 8):
        resumed.log({"train/loss": 1 / step}, step)
        resumed.log({"val/loss": 2.0}, step)
    resumed.close()
    records = store.get_logs("direct", run_id=run)
    assert curve_of(records) == [(step, 1 / step) for step in range(1, 8)]
    assert curve_of(records, "val/loss") == [(step, 2.0) for step in range(2, 8)]
    kept = store.get_run_config("direct", "abc-00ff")
    assert (kept["optim.lr"], kept["_Group"]) == (0.1, "exp")


def test_a_run_of_trackio_of_the_program_is_used_and_left_open(store: Any) -> None:
    import trackio

    mine = trackio.init(project="mine", name="own", auto_log_cpu=False)
    tracker = TrackioTracker(tracked())
    assert tracker.run is mine
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    trackio.log({"loss": 0.5}, step=2)
    trackio.finish()
    records = store.get_logs("mine", run_id=mine.id)
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 0.5)]


def test_resumed_runner_continues_its_own_run(tmp_path: Path, store: Any) -> None:
    tracked = {"enabled": True, "project": "toy"}
    more = {
        "auto_resume": True,
        "log_interval": 1,
        "model": {"api_key": "hidden"},
        "trackio": tracked,
    }
    config = settings(tmp_path / "run", **more)
    for steps in (4, 6):
        with Small({**config, "steps": steps}) as runner:
            runner.train()
    curve = curve_of(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]
    assert curve_of(store.get_logs("toy", run=runner.id)) == curve
    assert "hidden" not in str(store.get_run_config("toy", runner.id))
