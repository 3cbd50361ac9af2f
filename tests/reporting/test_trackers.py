"""Curves read back by the readers that their users have."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danling.reporting import (
    JsonlTracker,
    MlflowTracker,
    TensorBoardTracker,
    TrackerSet,
    TrackioTracker,
    WandbTracker,
    read_jsonl,
)
from danling.reporting import tracker_services as module


def test_jsonl_is_one_object_a_line(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log({"train/loss": 0.5, "train/grad_norm": math.nan}, 1)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert record.pop("time") > 1.7e9
    assert record == {"step": 1, "train/loss": 0.5, "train/grad_norm": None}
    tracker.close()
    tracker.close()


def test_jsonl_is_cut_back_to_the_resumed_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first = JsonlTracker(file)
    for step in range(1, 8):
        first.log({"loss": float(step)}, step)
    first.close()
    with file.open("a") as torn:
        torn.write('{"step": 8, "lo')
    resumed = JsonlTracker(file, resume_step=5)
    for step in range(6, 10):
        resumed.log({"loss": -float(step)}, step)
    resumed.close()
    assert [record["step"] for record in read_jsonl(file)] == list(range(1, 10))
    assert [record["loss"] for record in read_jsonl(file)] == [1.0, 2.0, 3.0, 4.0, 5.0, -6.0, -7.0, -8.0, -9.0]
    resumed.log({"loss": 0.0}, 10)
    assert len(read_jsonl(file)) == 10
    resumed.close()


def test_jsonl_of_another_attempt_from_scratch_starts_anew_but_only_when_it_logs(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    first = JsonlTracker(file)
    first.log({"loss": 1.0}, 1)
    first.close()
    JsonlTracker(file).close()
    assert len(read_jsonl(file)) == 1, "an attempt that only evaluates must not wipe the curves"
    second = JsonlTracker(file)
    second.log({"loss": 2.0}, 1)
    second.close()
    assert [record["loss"] for record in read_jsonl(file)] == [2.0]


@pytest.mark.parametrize("name", ["step", "time", "ranks"])
def test_jsonl_refuses_its_own_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"Rename '{name}', for example to 'train/{name}'"):
        JsonlTracker(tmp_path / "metrics.jsonl").log({name: 1.0}, 1)


def test_tensorboard_is_read_by_its_own_reader(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    first = TensorBoardTracker(tmp_path / "tb")
    for step in range(1, 8):
        first.log({"train/loss": float(step), "train/lr": 0.1}, step)
    first.close()
    first.close()
    resumed = TensorBoardTracker(tmp_path / "tb", purge_step=5)
    resumed.log({"train/loss": 50.0}, 5)
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/lr"]
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert curve == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]


def wandb_files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "wandb").glob("offline-run-*") if path.is_dir())


def wandb_records(directory: Path) -> list[Any]:
    """Read the offline transaction log once W&B's service has written its end, which a busy machine may let it do after `finish`."""
    end = time.monotonic() + 60
    while True:
        records = _wandb_records(directory)
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > end:
            return records
        time.sleep(0.1)


def _wandb_records(directory: Path) -> list[Any]:
    """Read what stands in the log so far: a LevelDB log (blocks of 32 KiB) of wandb's own messages; a cut record is left out."""
    from wandb.proto import wandb_internal_pb2 as messages

    record_type: Any = vars(messages)["Record"]
    raw = next(directory.glob("*.wandb")).read_bytes()
    records, parts, at = [], b"", 7
    while at + 7 <= len(raw):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        if at + 7 + length > len(raw):
            break
        parts += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            records.append(record_type.FromString(parts))
            parts = b""
    return records


@pytest.fixture
def quiet_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.teardown()  # its service would outlive the test


@pytest.mark.usefixtures("quiet_wandb")
def test_wandb_offline_takes_all_keys_and_a_resumed_run_continues_its_own(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "project": "lin",
        "run_id": "abc1234-00ff",
        "entity": "team",
        "group": "exp",
        "name": "first",
        "job_type": "train",
        "tags": "one",
        "dir": tmp_path,
        "mode": "offline",
        "config": {"optim": {"lr": 0.1}},
    }
    first = WandbTracker(**settings)
    first.log({"train/loss": 0.5}, 10)
    first.close()
    first.close()
    second = WandbTracker(**{**settings, "tags": ["one", "two"]})
    second.log({"train/loss": 0.25}, 20)
    second.close()
    directories = wandb_files(tmp_path)
    assert len(directories) == 2
    # Two attempts within one second differ by a suffix that wandb adds.
    names = [re.sub(r"-abc1234-00ff(-\d+)?$", "", directory.name) for directory in directories]
    assert all(re.fullmatch(r"offline-run-\d{8}_\d{6}", name) for name in names), names
    for directory, step, value in zip(directories, (10, 20), (0.5, 0.25), strict=True):
        records = wandb_records(directory)
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, run.entity) == ("abc1234-00ff", "lin", "team")
        assert (run.run_group, run.display_name, run.job_type) == ("exp", "first", "train")
        assert list(run.tags) == (["one"] if step == 10 else ["one", "two"])
        assert json.loads(next(item.value_json for item in run.config.update if item.key == "optim")) == {"lr": 0.1}
        logged = next(record.history for record in records if record.WhichOneof("record_type") == "history")
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in logged.item}
        assert logged.step.num == step
        assert items["train/loss"] == value


@pytest.mark.usefixtures("quiet_wandb")
@pytest.mark.parametrize(
    ("status", "exit_code", "preempting"),
    [("finished", 0, False), ("failed", 1, False), ("interrupted", 255, False), ("preempted", 143, True)],
)
def test_wandb_is_told_how_a_run_ended(tmp_path: Path, status: str, exit_code: int, preempting: bool) -> None:
    trackers = TrackerSet(is_main=True)
    trackers.add(lambda: WandbTracker(project="lin", run_id="abc1234-00ff", dir=tmp_path, mode="offline"))
    trackers.open()
    for each in ("running", status):
        trackers.set_status(each)
    trackers.close()
    records = wandb_records(wandb_files(tmp_path)[0])
    (end,) = [record.exit for record in records if record.WhichOneof("record_type") == "exit"]
    assert end.exit_code == exit_code
    assert any(record.WhichOneof("record_type") == "preempting" for record in records) == preempting


@pytest.mark.usefixtures("quiet_wandb")
def test_wandb_run_of_the_program_is_used_and_left_open(tmp_path: Path) -> None:
    import wandb

    mine = wandb.init(project="mine", dir=str(tmp_path), mode="offline")
    tracker = WandbTracker(project="lin", run_id="abc")
    assert tracker.run is mine
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert wandb.run is mine
    mine.finish()


@pytest.mark.parametrize(
    ("package", "tracker", "settings"),
    [
        ("tensorboard", TensorBoardTracker, {"directory": "x"}),
        ("wandb", WandbTracker, {"project": "p", "run_id": "i"}),
        ("mlflow", MlflowTracker, {"experiment": "p", "run_id": "i"}),
        ("trackio", TrackioTracker, {"project": "p", "run_id": "i"}),
    ],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, tracker: type, settings: dict[str, str]
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install {package}"):
        tracker(**settings)


def test_a_status_goes_to_the_trackers_that_take_one_and_hides_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Plain:
        def log(self, values: object, step: int) -> None: ...
        def flush(self) -> None: ...
        def close(self) -> None: ...

    class Told(Plain):
        not_saved = ("seen",)

        def __init__(self) -> None:
            self.seen: list[str] = []

        def set_status(self, status: str) -> None:
            self.seen.append(status)
            if status == "failed":
                raise OSError("the store does not answer")

    trackers, told = TrackerSet(is_main=True), Told()
    for tracker in (Told(), Plain(), told):
        trackers.add(tracker)
    trackers.open()
    with pytest.raises(ZeroDivisionError), trackers.telling_status():
        1 / 0  # noqa: B018
    trackers.set_status_after(ZeroDivisionError())  # by the block around the training, which the error ends too
    with pytest.raises(SystemExit), trackers.telling_status():
        raise SystemExit(143)
    with pytest.raises(SystemExit), trackers.telling_status():
        raise SystemExit(3)
    with pytest.raises(SystemExit), trackers.telling_status():
        raise SystemExit
    with pytest.raises(SystemExit), trackers.telling_status():
        raise SystemExit(["a list", "that has no hash"])
    with trackers.telling_status():
        pass
    with trackers.telling_status(whole=False):
        pass
    ended = ["failed", "preempted", "failed", "finished", "failed", "finished"]
    assert told.seen == [each for end in ended for each in ("running", end)] + ["running"]
    assert caplog.text.count("\nOSError: the store does not answer") == 6


def test_importing_the_rooms_imports_no_tracker() -> None:
    script = (
        "import sys, danling.workspace, danling.supervision, danling.reporting.tracker_services\n"
        "trackers = ('tensorboard', 'wandb', 'mlflow', 'trackio', 'torch.utils.tensorboard')\n"
        "print([name for name in trackers if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
