"""Both sides of a stream, put together from what runs have written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from danling.workspace import Workspace
from danling.workspace.runs import Run, StreamSide, streams_of

RECORD = {
    "stream": "a",
    "side": "trainer",
    "published": 9,
    "trained": 4,
    "waited_seconds": 0.5,
    "end": None,
}


def side(
    root: Path,
    name: str,
    kind: str,
    published: int,
    trained: int,
    *,
    end: str | None = None,
    at: float = 0.0,
) -> Run:
    (root / name).mkdir(exist_ok=True)
    file = root / name / "streams.json"
    record = {**RECORD, "side": kind, "published": published, "trained": trained, "end": end}
    file.write_text(json.dumps({"train": record}))
    os.utime(file, (at, at))
    return Run(root / name, name)


def test_sides_of_one_log_are_one_stream(tmp_path: Path) -> None:
    runs = [
        side(tmp_path, "p1", "producer", 30, 10, end="stopped", at=3.0),
        side(tmp_path, "t", "trainer", 24, 16, end=None, at=2.0),
        side(tmp_path, "p2", "producer", 28, 10, end=None, at=1.0),
    ]
    assert streams_of(runs) == [
        {
            "stream": "a",
            "published": 30,
            "trained": 16,
            "waiting": 14,
            "end": "stopped",
            "producers": [
                {"run": "p1", "waited_seconds": 0.5},
                {"run": "p2", "waited_seconds": 0.5},
            ],
            "trainers": [{"run": "t", "trained": 16, "waited_seconds": 0.5}],
        }
    ]


def test_last_line_decides_the_end_of_the_log_and_complete_is_final(tmp_path: Path) -> None:
    stopped = side(tmp_path, "p", "producer", 8, 8, end="stopped", at=1.0)
    resumed = side(tmp_path, "t", "trainer", 8, 8, at=2.0)
    complete = side(tmp_path, "q", "producer", 8, 8, end="complete", at=0.0)
    ends = [
        streams_of(runs)[0]["end"] for runs in ([stopped], [stopped, resumed], [complete, resumed])
    ]
    assert ends == ["stopped", "open", "complete"]


@pytest.mark.parametrize(
    "record", [{}, {**RECORD, "side": "both"}, {**RECORD, "trained": "many"}, 3, None]
)
def test_invalid_record_is_named_and_hides_no_run(tmp_path: Path, record: object) -> None:
    (tmp_path / "streams.json").write_text(json.dumps({"train": record}))
    run = Run(tmp_path, "run")
    assert run.streams == []
    assert len(run.problems) == 1 and str(tmp_path / "streams.json") in run.problems[0]


def test_unwritable_file_is_logged_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workspace = Workspace(tmp_path, timestamp="t")
    workspace.write_streams({"train": RECORD})
    assert Run(tmp_path, "run").streams == [
        StreamSide.of("run", RECORD, os.stat(workspace.streams_file).st_mtime),
    ]
    Workspace(tmp_path / "gone", timestamp="t").write_streams({"train": RECORD})
    assert "could not be written" in caplog.text
    Workspace(tmp_path / "gone", timestamp="t", is_main=False).write_streams({})
    assert not (tmp_path / "gone").exists()
