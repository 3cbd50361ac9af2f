"""Curves in MLflow and trackio: local stores, read back by their own readers."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.reporting import MlflowTracker, TrackioTracker, read_jsonl


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def store_of_trackio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # It looks once where its directory is.
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    yield SQLiteStorage
    del os.environ["TRACKIO_DIR"]


def points(client: Any, run: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run, key)]


def curve_of(records: list[dict[str, Any]], name: str = "train/loss") -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if name in record]


def test_mlflow_has_every_step_once_and_what_does_not_take_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/store.db"
    settings: dict[str, Any] = {"uri": uri, "experiment": "lin", "run_id": "abc-00ff", "tags": {"kind": "first"}}
    first = MlflowTracker(**settings, name="mine", config={"optim": {"lr": 0.1}, "steps": 5, "note": "x" * 900})
    for step in range(1, 6):
        first.log({"train/loss": 1 / step, "val/acc@5 (top)": math.nan, "highest": math.inf}, step)
    first.log({"val/loss": 2.0}, 2)  # killed before those of steps 4 and 5
    resumed = MlflowTracker(**settings, resumed=True, config={"steps": 9, "added": True})
    for step in range(3, 8):
        resumed.log({"train/loss": 1 / step}, step)
        resumed.log({"val/loss": 2.0}, step)
    resumed.flush()
    resumed.close()
    resumed.close()
    client = mlflow.MlflowClient(uri)
    assert resumed.run_id == first.run_id
    run = client.get_run(first.run_id)
    assert (run.info.run_name, run.info.status, run.data.tags["kind"]) == ("mine", "FINISHED", "first")
    kept = {name: value for name, value in run.data.params.items() if name != "note"}
    assert kept == {"optim.lr": "0.1", "steps": "5", "added": "True"}
    assert points(client, first.run_id, "train/loss") == [(step, 1 / step) for step in range(1, 8)]
    assert points(client, first.run_id, "val/loss") == [(step, 2.0) for step in range(2, 8)]
    assert math.isnan(run.data.metrics["val/acc_5 _top_"]) and run.data.metrics["highest"] > 1e300
    fresh = MlflowTracker(**settings)
    assert fresh.run_id != first.run_id, "a run that starts from scratch must not mix with an earlier one"
    again = MlflowTracker(**settings, resumed=True)
    assert again.run_id == fresh.run_id
    with sqlite3.connect(tmp_path / "store.db") as store:
        store.execute("ALTER TABLE metrics RENAME TO lost")
    with caplog.at_level(logging.WARNING, logger="danling"):
        again.log({"train/loss": 1.0}, 1)
    assert "MLflow has not taken the metrics of step 1" in caplog.text


def test_trackio_has_every_step_once(store_of_trackio: Any) -> None:
    settings: dict[str, Any] = {"project": "direct", "run_id": "abc-00ff", "group": "exp"}
    settings["config"] = {"optim": {"lr": 0.1}, "_own": 3}
    first = TrackioTracker(**settings)
    run = first.run.id
    for step in range(1, 6):
        first.log({"train/loss": 1 / step, "val/acc": math.nan}, step)
    first.log({"val/loss": 2.0}, 2)
    first.flush()
    assert len(store_of_trackio.get_logs("direct", run_id=run)) == 6  # what a killed process leaves
    first.close()
    first.close()
    resumed = TrackioTracker(**settings, resumed=True)
    assert resumed.run.id == run
    for step in range(3, 8):
        resumed.log({"train/loss": 1 / step}, step)
        resumed.log({"val/loss": 2.0}, step)
    resumed.close()
    records = store_of_trackio.get_logs("direct", run_id=run)
    assert curve_of(records) == [(step, 1 / step) for step in range(1, 8)]
    assert curve_of(records, "val/loss") == [(step, 2.0) for step in range(2, 8)]
    config = store_of_trackio.get_run_config("direct", "abc-00ff")
    assert (config["optim.lr"], config["own"], config["_Group"]) == (0.1, 3, "exp")


def test_a_run_of_trackio_of_the_program_is_used_and_left_open(store_of_trackio: Any) -> None:
    import trackio

    mine = trackio.init(project="mine", name="own", auto_log_cpu=False)
    tracker = TrackioTracker(project="other", run_id="abc")
    assert tracker.run is mine
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    trackio.log({"loss": 0.5}, step=2)
    trackio.finish()
    records = store_of_trackio.get_logs("mine", run_id=mine.id)
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 0.5)]


class Toy(dl.Runner):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(4, 2), nn.CrossEntropyLoss()
        self.datasets = {"train": TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))}


def test_a_runner_writes_to_both_and_goes_on_in_them_when_it_is_resumed(tmp_path: Path, store_of_trackio: Any) -> None:
    mlflow = pytest.importorskip("mlflow")
    config: dict[str, Any] = {
        "steps": 4,
        "seed": 1,
        "dir": str(tmp_path / "run"),
        "auto_resume": True,
        "lineage": "toy",
    }
    config |= {"mlflow": {"enabled": True}, "trackio": {"enabled": True, "project": "toy"}, "log_interval": 1}
    config |= {"optim": {"type": "sgd", "lr": 0.1}, "dataloader": {"batch_size": 4}, "model": {"api_key": "hidden"}}
    for steps in (4, 6):
        with Toy({**config, "steps": steps}) as runner:
            runner.train()
    curve = curve_of(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert run.info.run_name == runner.id and points(client, run.info.run_id, "train/loss") == curve
    assert run.data.params["optim.lr"] == "0.1" and "hidden" not in str(run.data.params)
    records = store_of_trackio.get_logs("toy", run=runner.id)
    assert curve_of(records) == curve
    assert "hidden" not in str(store_of_trackio.get_run_config("toy", runner.id))
