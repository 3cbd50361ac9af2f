"""A restart goes on whatever lies under the names of a run's own files, and says what it has moved aside."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recorded import record_run
from support.toys import TracingRunner

from danling.checkpoints import CheckpointDiskError, read_config

FILES = ("metrics.jsonl", "results.json", "latest.json", "best.json")
DESCRIPTION = (
    "config.full.yaml",
    "config.canonical.yaml",
    "config.diff.yaml",
    "git.yaml",
    "git.diff",
)
PLACES = ("dir", "checkpoint_dir", "workspace_root", "log_file")


def directory(path: Path) -> None:
    (path / "within").mkdir(parents=True)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def overlong(path: Path) -> None:
    path.symlink_to("long" * 100)


STRANGE: dict[str, Callable[[Path], object]] = {
    "directories": directory,
    "named pipes": os.mkfifo,
    "loops of links": loop,
    "links that lead nowhere": dangling,
    "links that cannot be followed": overlong,
    "files of somebody": lambda path: path.write_bytes(b"\xff\x00mine"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return record_run(tmp_path)


def replaced(path: Path, strange: str) -> Path:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    STRANGE[strange](path)
    return path


def go_on(run: Path) -> tuple[int, int]:
    """Restart for four more steps, and return where it began and ended."""
    stored: dict[str, Any] = read_config(run / "checkpoints" / "latest.pth")
    kept = {key: value for key, value in stored.items() if key not in PLACES}
    with TracingRunner({**kept, "steps": 16, "dir": str(run), "auto_resume": True}) as runner:
        begun = runner.state.train.global_step
        runner.train()
        return begun, runner.state.train.global_step


@pytest.mark.timeout(100)
@pytest.mark.parametrize("strange", ["directories", "named pipes", "files of somebody"])
def test_strange_things_in_place_of_files_block_no_restart(
    run: Path, strange: str, caplog: pytest.LogCaptureFixture
) -> None:
    for path in [run / name for name in FILES] + [run / "metadata" / name for name in DESCRIPTION]:
        replaced(path, strange)
    with caplog.at_level(logging.WARNING, "danling"):
        assert go_on(run) == (12, 16)
    assert (run / "metrics.jsonl").is_file() and (run / "metadata" / "config.full.yaml").is_file()
    if strange != "files of somebody":
        asides = sorted(run.rglob("*.aside-*"))
        assert len(asides) == len(FILES) + len(DESCRIPTION)
        assert all(any(str(aside) in message for message in caplog.messages) for aside in asides)
    assert go_on(run) == (16, 16)


@pytest.mark.timeout(100)
# A link in place of the metadata is refused: tests/workspace/test_workspace.py.
@pytest.mark.parametrize(
    ("name", "strange"),
    [
        ("metadata", "named pipes"),
        ("logs", "links that lead nowhere"),
        ("logs", "loops of links"),
        ("logs", "links that cannot be followed"),
    ],
)
def test_strange_things_in_place_of_directories_block_no_restart(
    run: Path, name: str, strange: str
) -> None:
    replaced(run / name, strange)
    assert go_on(run) == (12, 16)
    assert any((run / name).iterdir()) and len(list(run.glob(f"{name}.aside-*"))) == 1


@pytest.mark.timeout(100)
@pytest.mark.parametrize("strange", ["named pipes", "loops of links", "links that lead nowhere"])
def test_strange_things_in_place_of_the_checkpoints_are_named(run: Path, strange: str) -> None:
    checkpoints = run / "checkpoints"
    kept = checkpoints.rename(run.parent / "kept")
    STRANGE[strange](checkpoints)
    stored = read_config(kept / "latest.pth")
    settings = {key: value for key, value in stored.items() if key not in PLACES}
    told = r"(?s)Expected .*/checkpoints\. Received: .*(Bring|move it away|Remove)"
    settings |= {"steps": 16, "dir": str(run), "auto_resume": True}
    with pytest.raises(CheckpointDiskError, match=told):
        TracingRunner(settings)
