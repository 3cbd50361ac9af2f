"""MLflow: a run of a local store for all attempts of a run, read back by MLflow's own client.

Library: mlflow-skinny
Works: `mlflow.enabled=true`, into a local database or any store that `mlflow.uri` names; the configuration as parameters
Exact: every step of a curve once after a kill and a resume; the status of a run that failed or was stopped
"""

from __future__ import annotations

import logging
import math
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.toys import Small, settings
from support.tracked import tracked

from danling.reporting import read_jsonl
from danling.reporting.trackers import MlflowTracker

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a store whose tables are made, which takes longer than to train."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/store.db"
    mlflow.MlflowClient(uri).search_experiments()
    return uri


def points(client: Any, run: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run, key)]


def test_store_has_every_step_once_and_refused_values_are_logged(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    uri = f"sqlite:///{shutil.copy(store.removeprefix('sqlite:///'), tmp_path)}"

    def opened(step: int = 0, **config: Any) -> MlflowTracker:
        return MlflowTracker(tracked(step=step, mlflow={"uri": uri, "name": "mine"}, **config))

    first = opened(optim={"lr": 0.1}, steps=5, model={"note": "x" * 900})
    for step in range(1, 6):
        first.log({"train/loss": 1 / step, "val/acc@5 (top)": math.nan, "highest": math.inf}, step)
    first.log({"val/loss": 2.0}, 2)  # killed before those of steps 4 and 5
    resumed = opened(3, steps=9, model={"added": True})
    for step in range(3, 8):
        resumed.log({"train/loss": 1 / step}, step)
        resumed.log({"val/loss": 2.0}, step)
    resumed.flush()
    resumed.close()
    resumed.close()
    client = mlflow.MlflowClient(uri)
    assert resumed.run_id == first.run_id
    run = client.get_run(first.run_id)
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    kept, wanted = (
        run.data.params,
        {"optim.lr": "0.1", "steps": "5", "model.added": "True", "model.note": "x" * 500},
    )
    assert {name: kept[name] for name in wanted} == wanted
    assert points(client, first.run_id, "train/loss") == [(step, 1 / step) for step in range(1, 8)]
    assert points(client, first.run_id, "val/loss") == [(step, 2.0) for step in range(2, 8)]
    assert math.isnan(run.data.metrics["val/acc_5 _top_"]) and run.data.metrics["highest"] > 1e300
    fresh = opened()
    assert fresh.run_id != first.run_id, (
        "a run that starts from scratch must not mix with an earlier one"
    )
    again = opened(1)
    assert again.run_id == fresh.run_id
    with sqlite3.connect(tmp_path / "store.db") as tables:
        tables.execute("ALTER TABLE metrics RENAME TO lost")
    with caplog.at_level(logging.WARNING, logger="danling"):
        again.log({"train/loss": 1.0}, 1)
    assert "MLflow has not taken the metrics of step 1" in caplog.text


def test_resumed_runner_continues_its_own_run(tmp_path: Path) -> None:
    more = {
        "auto_resume": True,
        "lineage": "toy",
        "log_interval": 1,
        "model": {"api_key": "hidden"},
    }
    config = settings(tmp_path / "run?", **more, mlflow={"enabled": True})
    for steps in (4, 6):
        with Small({**config, "steps": steps}) as runner:
            runner.train()
    lines = read_jsonl(tmp_path / "run?" / "metrics.jsonl")
    curve = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    assert [step for step, _ in curve] == [1, 2, 3, 4, 5, 6]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run%3F/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    assert run.info.run_name == runner.id and points(client, run.info.run_id, "train/loss") == curve
    assert run.data.params["optim.lr"] == "0.1" and "hidden" not in str(run.data.params)


def status_in(uri: str, lineage: str) -> str:
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name(lineage).experiment_id])
    assert run.info.status == "RUNNING" or run.info.end_time is not None
    return str(run.info.status)


class Ending(Small):
    def __init__(self, config: dict[str, Any], happens: Callable[[Any], None]) -> None:
        super().__init__(config)
        self.happens = happens

    def train_step(self, data: Any) -> Any:
        if self.state.train.global_step == 2:
            self.happens(self)
        return super().train_step(data)


def _fails(runner: Any) -> None:
    raise RuntimeError("of the user's own")


def _interrupts(runner: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("happens", "raised", "status"),
    [
        (_fails, RuntimeError, "FAILED"),
        (_interrupts, KeyboardInterrupt, "KILLED"),
        (lambda runner: signal.raise_signal(signal.SIGTERM), SystemExit, "KILLED"),
        (lambda runner: runner.stop(), None, "FINISHED"),
    ],
    ids=["fails", "interrupts", "terminates", "stops"],
)
def test_status_of_a_run_is_set_even_without_a_close(
    tmp_path: Path, store: str, happens: Any, raised: type[BaseException] | None, status: str
) -> None:
    lineage = f"{raised} ends it"
    tracked = {"enabled": True, "uri": store}
    config = settings(tmp_path, steps=4, lineage=lineage, auto_resume=True, mlflow=tracked)
    runner = Ending(config, happens)
    with nullcontext() if raised is None else pytest.raises(raised):
        runner.train()
    assert status_in(store, lineage) == status
    runner.close()
    assert status_in(store, lineage) == status
    seen = list[str]()
    with Ending(config, lambda runner: seen.append(status_in(store, lineage))) as resumed:
        resumed.train()
    assert status_in(store, lineage) == "FINISHED" and set(seen) <= {"RUNNING"}
