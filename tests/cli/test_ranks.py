"""`danling ranks` on what runs have written: a table and JSON, by path and by URL; and what it says where there is nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.remote_runs import upload_run

from danling.cli.main import main
from danling.cli.plot import group
from danling.remote.store import open_store
from danling.remote.stored_run import RunLayout
from danling.workspace.runs import Run

RANKS: dict[str, list[object]] = {
    "data": [1.0, 4.0],
    "computing": [5.0, 5.0],
    "waiting": [4.0, 1.0],
    "checkpointing": [0.0, 0.0],
}
RANKS |= {"evaluating": [0.0, 0.0], "hosts": ["a", None]}
LINES: list[dict[str, object]] = [
    {"step": 1, "time": 1.0, "train/loss": 0.5},
    {"step": 2, "time": 12.0, "train/loss": 0.4, "ranks": RANKS},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "lin" / "run"
    directory.mkdir(parents=True)
    (directory / "checkpoints").mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return directory


@pytest.mark.parametrize("by_url", [False, True])
def test_table_adds_up_the_lines(
    run: Path, tmp_path: Path, by_url: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    place = str(run)
    if by_url:
        place = f"file://{tmp_path}/store"
        upload_run(run, open_store(place), RunLayout("lin", "run"))
    assert main(["ranks", place]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", "-", "3", "30.0%", "data", "4", "5", "1", "0", "0"]
    assert second.split() == ["0", "a", "0", "0.0%", "-", "1", "5", "4", "0", "0"]
    assert main(["ranks", place, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ranks"]
    seconds = {
        "data": 4.0,
        "computing": 5.0,
        "waiting": 1.0,
        "checkpointing": 0.0,
        "evaluating": 0.0,
    }
    assert found[0] == {
        "rank": 1,
        "host": None,
        "lost": 3.0,
        "share": 0.3,
        "cause": "data",
        "seconds": seconds,
    }


def test_times_of_ranks_are_no_metric_of_a_plot(run: Path) -> None:
    assert list(group([Run(run, "run")])) == ["loss"]


def test_missing_rank_times_are_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "metrics.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    assert main(["ranks", str(run)]) == 3 and "comm.slow_rank_share" in capsys.readouterr().err
    (run / "metrics.jsonl").write_bytes(b"\x00\n")
    assert main(["ranks", str(run)]) == 1 and "cannot be read" in capsys.readouterr().err
    (run.parent / "other").mkdir()
    (run.parent / "other" / "metrics.jsonl").write_text("")
    assert main(["ranks", str(run.parent)]) == 2 and "Expected one run" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert (
        main(["ranks", str(tmp_path / "empty")]) == 3
        and main(["ranks", str(tmp_path / "none")]) == 3
    )
