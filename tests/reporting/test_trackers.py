"""Curves read back by the readers that their users have."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tracked import tracked

from danling.reporting import JsonlTracker, media, read_jsonl
from danling.reporting import trackers as module
from danling.reporting.trackers import (
    BUILT_IN_TRACKERS,
    TensorBoardTracker,
    TrackerSet,
    WandbTracker,
)


def log_steps(tracker: JsonlTracker, steps: range, sign: int = 1) -> None:
    for step in steps:
        tracker.log({"loss": float(sign * step)}, step)
    tracker.close()


def test_jsonl_is_one_object_a_line_and_is_cut_back_to_the_resumed_step(tmp_path: Path) -> None:
    file = tmp_path / "run" / "metrics.jsonl"
    log_steps(JsonlTracker(file), range(1, 8))
    with file.open("a") as torn:
        torn.write('{"step": 8, "lo')
    log_steps(resumed := JsonlTracker(file, resume_step=5), range(6, 10), -1)
    assert [(line["step"], line["loss"]) for line in read_jsonl(file)] == [
        (step, float(step if step < 6 else -step)) for step in range(1, 10)
    ]
    resumed.log({"loss": math.nan}, 10)
    last = json.loads(file.read_text().splitlines()[-1])
    assert last.pop("time") > 1.7e9 and last == {"step": 10, "loss": None}
    resumed.close()
    resumed.close()


def test_jsonl_of_another_attempt_from_scratch_starts_anew_but_only_when_it_logs(
    tmp_path: Path,
) -> None:
    file = tmp_path / "metrics.jsonl"
    log_steps(JsonlTracker(file), range(1, 2))
    JsonlTracker(file).close()
    assert len(read_jsonl(file)) == 1, "an attempt that only evaluates must not wipe the curves"
    log_steps(JsonlTracker(file), range(1, 2), 2)
    assert [record["loss"] for record in read_jsonl(file)] == [2.0]


@pytest.mark.parametrize("name", ["step", "time", "ranks"])
def test_jsonl_refuses_its_own_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"Rename '{name}', for example to 'train/{name}'"):
        JsonlTracker(tmp_path / "metrics.jsonl").log({name: 1.0}, 1)


def test_only_a_tracker_with_its_own_log_gets_no_ranks(tmp_path: Path) -> None:
    class Named(JsonlTracker):
        pass

    class Halved(JsonlTracker):
        def log(self, values: Any, step: int) -> None:  # type: ignore[override]
            super().log({name: value / 2 for name, value in values.items()}, step)

    trackers = TrackerSet(tracked(tmp_path))
    trackers.opened = [Named(tmp_path / "named"), Halved(tmp_path / "halved")]
    trackers.log({"loss": 1.0}, 1, beside={"ranks": [0]})
    trackers.close()
    assert [
        line.get("ranks") for name in ("named", "halved") for line in read_jsonl(tmp_path / name)
    ] == [[0], None]


def test_tensorboard_is_read_by_its_own_reader(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    first = TensorBoardTracker(tracked(tmp_path))
    for step in range(1, 8):
        first.log({"train/loss": float(step), "train/lr": 0.1}, step)
    first.close()
    first.close()
    resumed = TensorBoardTracker(tracked(tmp_path, step=4))
    resumed.begin_training()
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
        if (
            any(record.WhichOneof("record_type") == "exit" for record in records)
            or time.monotonic() > end
        ):
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
        "entity": "team",
        "group": "exp",
        "name": "first",
        "job_type": "train",
        "tags": "one",
        "mode": "offline",
    }

    def opened(**more: Any) -> WandbTracker:
        return WandbTracker(
            tracked(tmp_path, run="abc1234-00ff", wandb=settings | more, optim={"lr": 0.1})
        )

    first = opened()
    first.log({"train/loss": 0.5}, 10)
    first.close()
    first.close()
    second = opened(tags=["one", "two"])
    second.log({"train/loss": 0.25}, 20)
    second.close()
    directories = wandb_files(tmp_path)
    for directory, step, value in zip(directories, (10, 20), (0.5, 0.25), strict=True):
        records = wandb_records(directory)
        run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
        assert (run.run_id, run.project, run.entity) == ("abc1234-00ff", "lin", "team")
        assert (run.run_group, run.display_name, run.job_type) == ("exp", "first", "train")
        assert list(run.tags) == (["one"] if step == 10 else ["one", "two"])
        assert json.loads(
            next(item.value_json for item in run.config.update if item.key == "optim")
        ) == {"lr": 0.1}
        logged = next(
            record.history for record in records if record.WhichOneof("record_type") == "history"
        )
        items = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in logged.item
        }
        assert logged.step.num == step
        assert items["train/loss"] == value


@pytest.mark.usefixtures("quiet_wandb")
@pytest.mark.parametrize(
    ("status", "exit_code", "preempting"),
    [
        ("finished", 0, False),
        ("failed", 1, False),
        ("interrupted", 255, False),
        ("preempted", 143, True),
    ],
)
def test_wandb_is_told_how_a_run_ended(
    tmp_path: Path, status: str, exit_code: int, preempting: bool
) -> None:
    trackers = TrackerSet(tracked(tmp_path, wandb={"mode": "offline"}))
    trackers.add(lambda: WandbTracker(trackers._runner))
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
    tracker = WandbTracker(tracked(tmp_path))
    assert tracker.run is mine
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert wandb.run is mine
    mine.finish()


@pytest.mark.usefixtures("quiet_wandb")
def test_wandb_has_each_kind_of_media(tmp_path: Path) -> None:
    tracker = WandbTracker(tracked(tmp_path, wandb={"mode": "offline"}))
    tracker.log_image("val/image", media.pixels_of(torch.zeros(3, 4, 5)), 2)
    tracker.log_histogram("val/histogram", media.numbers_of([1.0, 2.0]), 2)
    tracker.log_text("val/text", "a <b> text", 2)
    tracker.log_table("val/table", media.rows_of(["name", "count"], [["a", 3]]), 2)
    tracker.close()
    records = wandb_records(wandb_files(tmp_path)[0])
    items = [
        item
        for record in records
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
    ]
    values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    kinds = {
        name.removesuffix("/_type"): value
        for name, value in values.items()
        if name.endswith("/_type")
    }
    assert kinds == {
        "val/image": "image-file",
        "val/histogram": "histogram",
        "val/text": "html-file",
        "val/table": "table-file",
    }


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install {package}"):
        BUILT_IN_TRACKERS[package](tracked())


class Told:
    """A tracker that keeps the statuses it is told, and fails at one."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def log(self, values: object, step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...

    def set_status(self, status: str) -> None:
        self.seen.append(status)
        if status == "failed":
            raise OSError("the store does not answer")


def test_status_goes_to_trackers_with_a_status_and_hides_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trackers, told = TrackerSet(tracked(Path("run"))), Told()
    for tracker in (Told(), told):
        trackers.add(tracker)
    trackers.open()
    ends: list[tuple[BaseException, str]] = [
        (ZeroDivisionError(), "failed"),
        (SystemExit(143), "preempted"),
        (SystemExit(3), "failed"),
        (SystemExit(), "finished"),
        (SystemExit(["a list", "that has no hash"]), "failed"),
    ]
    for error, _ in ends:
        with pytest.raises(type(error)), trackers.telling_status():
            raise error
        trackers.set_status_after(
            error
        )  # by the block around the training, which the error ends too
    for whole in (True, False):
        with trackers.telling_status(whole=whole):
            pass
    ended = [*(status for _, status in ends), "finished"]
    assert told.seen == [each for end in ended for each in ("running", end)] + ["running"]
    assert caplog.text.count("\nOSError: the store does not answer") == 6


def test_importing_the_rooms_imports_no_tracker() -> None:
    script = (
        "import sys, danling.workspace, danling.supervision, danling.reporting.trackers\n"
        "trackers = ('tensorboard', 'wandb', 'mlflow', 'trackio', 'torch.utils.tensorboard')\n"
        "print([name for name in trackers if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
