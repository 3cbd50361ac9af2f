"""Files that are larger, or of another kind, than the library writes them: refused or left alone, never read whole."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

import pytest
from support.saves import make_manager, save
from support.toys import Small, settings

from danling.checkpoints import CheckpointDamaged
from danling.checkpoints.manifest import HEADER, Manifest, Record
from danling.cli.plot import group
from danling.stream import FileChannel, SQLiteChannel
from danling.stream.refs import LONGEST_LINE, SampleRef
from danling.utils.locks import FileLock, exclusive, shared
from danling.workspace.runs import Run

OUTSIDE = "of another program"


def sparse(path: Path, size: int = 8 << 30) -> Path:
    """Make a file that claims some gigabytes and takes no room."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize("kind", ["sparse", "pipe", "link"])
def test_results_of_another_kind_are_replaced_unread(kind: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(OUTSIDE)
    with Small(settings(tmp_path / "run", steps=2)) as runner:
        for name in ("results.json", "latest.json", "best.json"):
            place = runner.workspace.dir / name
            if kind == "sparse":
                sparse(place)
            elif kind == "pipe":
                os.mkfifo(place)
            else:
                place.symlink_to(outside)
        runner.train()
        assert Run(runner.workspace.dir, "run").results.keys() == {1, 2}
        assert not os.path.islink(runner.workspace.dir / "latest.json")
    assert outside.read_text() == OUTSIDE


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "hard link", "link"])
@pytest.mark.parametrize("lock", ["of a run", "exclusive", "shared"])
def test_lock_of_another_kind_is_refused(kind: str, lock: str, tmp_path: Path) -> None:
    outside, place = tmp_path / "outside", tmp_path / "lock"
    outside.write_text(OUTSIDE)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(outside)
    else:
        place.hardlink_to(outside)
    with pytest.raises((ValueError, OSError), match="lock"):
        if lock == "of a run":
            FileLock(place).acquire()
        elif lock == "exclusive":
            with exclusive(place):
                pass
        else:
            with shared(place, seconds=1.0):
                pass
    assert outside.read_text() == OUTSIDE


def test_lock_of_the_library_is_taken(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire()
    with (
        exclusive(tmp_path / "other"),
        (tmp_path / "other").open() as file,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    lock.release()


def test_hard_link_in_the_place_of_a_mark_keeps_its_contents(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text(OUTSIDE)
    manager = make_manager("file", tmp_path / "checkpoints", keep=1)
    for step in (1, 2):
        save(manager, step, history=True)
        (tmp_path / "checkpoints" / f".deleting-ckpt-s{step:012d}").hardlink_to(outside)
    save(manager, 3, history=True)
    manager.close()
    assert outside.read_text() == OUTSIDE


def test_manifest_of_too_many_names_is_refused() -> None:
    record = Record("latest", 1, 0, (), "run", 1, 0)
    most = Manifest(record, {f"{number:06d}": (0, "0" * 64) for number in range(100_002)}).text()
    assert most.startswith(HEADER)
    with pytest.raises(CheckpointDamaged, match="more than 100,000 files"):
        Manifest.parse(most)


def test_plot_of_too_many_metrics_asks_for_names(tmp_path: Path) -> None:
    line = ", ".join(f'"train/m{number}": 1.0' for number in range(100_000))
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, {line}}}\n')
    run = Run(tmp_path, "a")
    with pytest.raises(
        ValueError, match="at most 100 metrics to draw. Received: 100000. Name some"
    ):
        group([run])
    assert list(group([run], ["m7"])) == ["m7"]
    with pytest.raises(ValueError, match="and 99980 more. Received: 'nothing'") as refused:
        group([run], ["nothing"])
    assert len(str(refused.value)) < 1000


def test_too_long_line_of_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Put large values into the features"):
        SampleRef("a", "object", {}, {"text": "x" * LONGEST_LINE}).to_json(0)
    channel = FileChannel(tmp_path / "log")
    channel.close()
    with (tmp_path / "log" / "log.jsonl").open("wb") as file:
        file.write(b'{"id":"a"')
        file.truncate(8 << 30)
    with pytest.raises(ValueError, match="Expected lines of at most"):
        FileChannel(tmp_path / "log").published()


def test_too_long_value_of_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    SQLiteChannel(path).close()
    with sqlite3.connect(path) as database:
        columns = [row[1] for row in database.execute("PRAGMA table_info(samples)")]
        values = {"place": 0, "id": "a", "ref": None}
        database.execute(
            f"INSERT INTO samples ({', '.join(values)}) VALUES (0, 'a', CAST(zeroblob({LONGEST_LINE + 1}) AS TEXT))"
        )
        assert {*values} <= {*columns}
    channel = SQLiteChannel(path)
    with pytest.raises(Exception, match="too big"):
        channel.read(0, 1)
    channel.close()
