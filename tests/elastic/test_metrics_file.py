"""When another rank becomes the main process, each line of metrics is there once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from danling.cli.main import main
from danling.elastic.metrics_file import missing_records, without_later
from danling.reporting.telemetry import MEASURED

from . import training


def _write(file: Path, *lines: dict[str, object], rest: str = "") -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + rest)


def test_lines_after_the_last_update_of_those_that_are_left_go(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(
        file,
        {"step": 1, "time": 0.0, "train/loss": 2.0},
        {"step": 2, "time": 0.0, "train/loss": 1.0},
        {"step": 2, "time": 0.0, "val/loss": 1.0},
        {"step": 3, "time": 0.0, "train/loss": 0.5},
        rest='{"step": 4, "ti',
    )
    # The evaluation at step 2 was logged by the rank that has died, and is made again.
    without_later(file, 2, [({"train/loss": 1.0}, 2)])
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 1, "time": 0.0, "train/loss": 2.0},
        {"step": 2, "time": 0.0, "train/loss": 1.0},
    ]


def test_line_that_is_nested_deep_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    deep = 100_000
    _write(
        file,
        {"step": 1, "time": 0.0, "train/loss": 2.0},
        rest=f'{{"step": 1, "x": {"[" * deep}{"]" * deep}}}\n',
    )
    assert missing_records(file, [({"train/loss": 2.0}, 1)]) == []
    without_later(file, 2, [])
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1]


def test_lines_that_the_dead_rank_has_not_written_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    _write(file, {"step": 1, "time": 0.0, "train/loss": 2.0})
    recent = [({"train/loss": 2.0}, 1), ({"train/loss": 1.0}, 2), ({"val/loss": 1.0}, 2)]
    assert missing_records(file, recent) == recent[1:]
    assert missing_records(tmp_path / "none", recent) == recent


def test_line_with_other_measured_figures_is_not_missing(tmp_path: Path) -> None:
    # A rank that reads no micro-batch has no tokens, and one without an update in it no speed.
    file = tmp_path / "metrics.jsonl"
    measured = {f"train/{name}": 1.0 for name in MEASURED}
    _write(
        file,
        {"step": 1, "time": 0.0, "train/loss": 2.0, **measured},
        {"step": 1, "time": 0.0, "val/loss": 2.0},
    )
    recent = [({"train/loss": 2.0}, 1), ({"val/loss": 2.0}, 1)]
    assert missing_records(file, recent) == []
    without_later(file, 1, recent)
    assert len(file.read_text().splitlines()) == 2


def test_all_that_is_measured_is_known_as_measured(tmp_path: Path) -> None:
    training.train(str(tmp_path), steps=3, dir=str(tmp_path / "run"), gradient_sum="fast")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    names = {name.removeprefix("train/") for line in lines if "train/loss" in line for name in line}
    assert "step_seconds" in names
    assert names - MEASURED == {
        "step",
        "time",
        "loss",
        "learning_rate",
        "grad_norm",
        "skipped_updates",
    }


def test_command_lists_the_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()
    (file.parent / "metadata").mkdir()
    change = {"elastic/ranks": 2.0, "elastic/gap_seconds": 0.05, "elastic/repeated": 1.0}
    _write(file, {"step": 1, "time": 0.0, "train/loss": 2.0}, {"step": 7, "time": 0.0, **change})
    assert main(["ranks", str(file.parent), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == [
        {"update": 7, "ranks after it": 2, "gap (s)": 0.05, "made again": "yes"}
    ]
