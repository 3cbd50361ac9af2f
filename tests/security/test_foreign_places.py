"""Links, pipes and hard links under the names that a run writes, in a directory that another person has filled."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.canary import look_at
from support.patience import until
from support.processes import child, fork, hold, wait
from support.toys import Small
from support.toys import settings as toy_settings

from danling.checkpoints import CheckpointError
from danling.checkpoints.checkpoint_store import CheckpointStore
from danling.checkpoints.file_store import FileStore
from danling.checkpoints.target_store import TargetStore
from danling.reporting.jsonl import JsonLines, read_jsonl
from danling.stream import DirectoryStore, FileChannel, SQLiteChannel
from danling.utils.files import open_file, read_bytes, write_atomically

Placement = Callable[[Path, Path], object]
"""Puts something at a path; the second one is a file outside."""

NAME = "ckpt-s000000000001"

PLACEMENTS: dict[str, Placement] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside.with_name("new.txt")),
    "hard link": lambda path, outside: os.link(outside, path),
    "pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "digests.jsonl"])
@pytest.mark.timeout(60)
def test_resume_opens_no_foreign_staged_file(
    tmp_path: Path, canary: Path, kind: str, name: str
) -> None:
    file = tmp_path / name
    file.write_text('{"step": 1}\n{"step": 2}\n')
    PLACEMENTS[kind](tmp_path / f".{name}.tmp", canary / "file.txt")
    lines = JsonLines(file, resume_step=1)
    lines.write({"step": 2, "again": True})
    lines.close()
    assert read_jsonl(file) == [{"step": 1}, {"step": 2, "again": True}]


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_resumed_run_leaves_the_goals_of_links_alone(
    tmp_path: Path, canary: Path, kind: str
) -> None:
    settings = toy_settings(tmp_path / "run", auto_resume=True)
    with Small({**settings, "steps": 2}) as runner:
        runner.train()
    PLACEMENTS[kind](tmp_path / "run" / ".metrics.jsonl.tmp", canary / "file.txt")
    with Small({**settings, "steps": 4}) as runner:
        runner.train()
    steps = [line["step"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert steps == sorted(steps) and steps[-1] == 4


def test_metrics_file_replaced_by_a_link_is_not_written(tmp_path: Path, canary: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.symlink_to(canary / "new.txt")
    with pytest.raises(OSError, match="Expected to write a line"):
        JsonLines(file).write({"step": 1})


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_small_file_replaces_anything_in_its_place(tmp_path: Path, canary: Path, kind: str) -> None:
    path = tmp_path / "results.json"
    PLACEMENTS[kind](path, canary / "file.txt")
    before = look_at(canary)
    write_atomically(path, "{}")
    assert (
        path.read_text() == "{}"
        and not path.is_symlink()
        and look_at(canary).keys() == before.keys()
    )
    assert [each.name for each in tmp_path.iterdir()] == ["results.json"]


def test_bounded_reader_takes_regular_files_only(tmp_path: Path, canary: Path) -> None:
    (tmp_path / "file").write_bytes(b"four")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "link", limit=4) == b"four"
    with pytest.raises(OSError, match="symbolic links"):
        read_bytes(tmp_path / "link", limit=4, follow=False)
    with pytest.raises(ValueError, match="at most 3 bytes"):
        read_bytes(tmp_path / "file", limit=3)
    handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert read_bytes("file", limit=4, directory=handle) == b"four"
    finally:
        os.close(handle)
    for name in ("pipe", "."):
        with pytest.raises(OSError, match="Not a regular file"):
            open_file(tmp_path / name)


class RemovesTheLock(Small):
    """Removes the lock of its run after the first save, and lets something happen then."""

    not_saved = ("happens",)

    def __init__(self, config: Any, happens: Callable[[], object]) -> None:
        super().__init__(config)
        self.happens = happens

    def optimizer_step(self) -> None:
        if self.state.train.global_step == 2:
            (self.dir / ".lock").unlink()
            self.happens()
        super().optimizer_step()


def _ends(function: Callable[[], object]) -> None:
    assert wait(fork(function)) == 0


@pytest.mark.parametrize("meanwhile", ["nothing", "another writes", "another has written"])
def test_run_without_its_lock_does_not_write_into_another_run(
    tmp_path: Path, meanwhile: str
) -> None:
    config = toy_settings(
        tmp_path / "run",
        auto_resume=True,
        steps=4,
        checkpoint={"interval": 1, "async_enabled": False},
    )

    def train() -> None:
        with Small(config) as other:
            other.train()

    with ExitStack() as stack:
        happens: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "another writes": lambda: _held(stack, tmp_path),
            "another has written": lambda: _ends(train),
        }
        runner = stack.enter_context(RemovesTheLock(config, happens[meanwhile]))
        if meanwhile == "nothing":
            runner.train()
            assert (runner.dir / ".lock").exists()
        else:
            received = (
                "has taken since .lock there was removed"
                if meanwhile == "another writes"
                else "may have started"
            )
            with pytest.raises(Exception, match=received):
                runner.train()


def _held(stack: ExitStack, root: Path) -> None:
    stack.enter_context(child(lambda: hold(root / "run" / ".lock", root / "held")))
    until((root / "held").exists)


class Exchanges(Small):
    """Exchanges a directory of its checkpoints for a link to that of another run, after its second update."""

    not_saved = ("place", "goal")

    def __init__(self, config: Any, place: str, goal: Path) -> None:
        super().__init__(config)
        self.place, self.goal = self.dir / place, goal / place

    def optimizer_step(self) -> None:
        if self.state.train.global_step == 4:
            self.place.rename(self.place.with_name("before"))
            self.place.symlink_to(self.goal)
        super().optimizer_step()


@pytest.mark.parametrize(
    ("backend", "place"),
    [("file", "checkpoints"), ("dcp", "checkpoints"), ("dcp", "checkpoints/targets")],
)
def test_retention_removes_nothing_in_a_replaced_directory(
    tmp_path: Path, backend: str, place: str
) -> None:
    def config(name: str, steps: int, keep: int) -> dict[str, Any]:
        policy = {"backend": backend, "interval": 1, "keep_latest_k": keep, "async_enabled": False}
        return toy_settings(tmp_path / name, steps=steps, auto_resume=True, checkpoint=policy)

    # A copy of the run: nothing but its place tells its checkpoints from those that retention may remove.
    with Small(config("run", 3, 0)) as other:
        other.train()
    shutil.copytree(tmp_path / "run", tmp_path / "goal")
    goal = tmp_path / "goal" / "checkpoints"
    before = {str(path) for path in goal.rglob("*")}
    with Exchanges(config("run", 6, 1), place, tmp_path / "goal") as runner, suppress(Exception):
        runner.train()
    assert {str(path) for path in goal.rglob("*")} >= before


def _open_directories() -> set[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {os.readlink(link) for link in links if os.path.isdir(link)}


@pytest.mark.parametrize(("store", "count"), [(FileStore, 1), (TargetStore, 2)])
def test_the_directories_of_saves_stay_open_until_the_store_is_gone(
    tmp_path: Path, store: type[CheckpointStore], count: int
) -> None:
    """Without that, another directory may get the inode of a removed one, and a network file system may change that of the same one."""
    made = store(tmp_path)
    (tmp_path / "targets").mkdir()
    made.pin()
    made.pin()
    own = {str(tmp_path), str(tmp_path / "targets")}
    assert len(_open_directories() & own) == count
    shutil.rmtree(tmp_path)
    (tmp_path / "targets").mkdir(parents=True)
    (tmp_path / NAME).write_text("of a user")
    with pytest.raises(CheckpointError, match="Received: another one"):
        made.delete(NAME)
    assert (tmp_path / NAME).exists()
    del made
    gc.collect()
    assert not [path for path in _open_directories() if path.startswith(str(tmp_path))]


@pytest.mark.parametrize("name", ["writing", "objects"])
def test_store_refuses_links_at_writes_and_removals(
    tmp_path: Path, canary: Path, name: str
) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("a", {"x": torch.ones(2)})
    shutil.rmtree(store.path / name)
    (store.path / name).symlink_to(canary)
    for use in (
        lambda: DirectoryStore(store.path),
        lambda: DirectoryStore(store.path).put("b", {"x": torch.ones(2)}),
    ):
        with pytest.raises(ValueError, match="Expected no link at"):
            use()


def test_store_with_a_folder_replaced_by_a_link_removes_nothing_there(
    tmp_path: Path, canary: Path
) -> None:
    store = DirectoryStore(tmp_path)
    (tmp_path / "writing").rmdir()
    (tmp_path / "writing").symlink_to(canary)
    with pytest.raises(ValueError, match="Expected no link at"):
        store.put("a", {"x": torch.ones(2)})


@pytest.mark.parametrize("kind", [*PLACEMENTS, "device", "huge", "directory"])
@pytest.mark.timeout(60)
def test_foreign_file_in_place_of_the_count_of_a_store_is_not_opened(
    tmp_path: Path, canary: Path, kind: str
) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", {"x": torch.ones(2)})
    (tmp_path / "usage.json").unlink()
    others: dict[str, Placement] = {
        "device": lambda path, _: path.symlink_to("/dev/zero"),
        "huge": lambda path, _: (path.touch(), os.truncate(path, 1 << 40)),
        "directory": lambda path, _: path.mkdir(),
    }
    {**PLACEMENTS, **others}[kind](tmp_path / "usage.json", canary / "file.txt")
    again = DirectoryStore(tmp_path)
    again.put("b", {"x": torch.ones(2)})
    assert again.usage() == sum(path.stat().st_size for path in (tmp_path / "objects").iterdir())


@pytest.mark.parametrize("name", ["log.jsonl", "lock", "committed.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling link"])
def test_a_stream_writes_through_no_link(
    tmp_path: Path, canary: Path, kind: str, name: str
) -> None:
    PLACEMENTS[kind](tmp_path / name, canary / "file.txt")
    with pytest.raises((OSError, ValueError)):
        channel = FileChannel(tmp_path)
        channel.claim("run")
        channel.end()
        channel.commit(0)


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal", "-shm"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.timeout(60)
def test_database_opens_no_foreign_pipe_or_link(
    tmp_path: Path, canary: Path, kind: str, suffix: str
) -> None:
    SQLiteChannel(tmp_path / "log.sqlite").close()
    (tmp_path / f"log.sqlite{suffix}").unlink(missing_ok=True)
    PLACEMENTS[kind](tmp_path / f"log.sqlite{suffix}", canary / "file.txt")
    with pytest.raises(ValueError, match="Expected (a file, or nothing yet|the log of a stream)"):
        SQLiteChannel(tmp_path / "log.sqlite")


@pytest.mark.parametrize("cut", [b"", b'{"value": '])
def test_producer_changes_no_log_with_another_name(tmp_path: Path, cut: bytes) -> None:
    FileChannel(tmp_path / "stream")
    log, outside = tmp_path / "stream" / "log.jsonl", tmp_path / "outside.jsonl"
    log.write_bytes(cut)
    os.link(log, outside)
    with pytest.raises(ValueError, match="2 names .hard links."):
        FileChannel(tmp_path / "stream").end()
    assert outside.read_bytes() == cut


def test_sqlite_opens_no_database_with_another_name(tmp_path: Path) -> None:
    SQLiteChannel(tmp_path / "log.sqlite").close()
    os.link(tmp_path / "log.sqlite", tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    with pytest.raises(ValueError, match="2 names .hard links."):
        SQLiteChannel(tmp_path / "log.sqlite")
    assert (tmp_path / "outside").read_bytes() == before


@pytest.mark.parametrize(
    "name", ["metadata", "logs", "tensorboard", "profiles", "heartbeats", "hangs"]
)
def test_resumed_run_writes_into_no_linked_directory(
    tmp_path: Path, canary: Path, name: str
) -> None:
    settings = toy_settings(tmp_path / "run", auto_resume=True)
    with Small({**settings, "steps": 2}) as runner:
        runner.train()
    shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    (tmp_path / "run" / name).symlink_to(canary)
    with pytest.raises(ValueError, match=f"Expected no link at .*{name}"):
        Small({**settings, "steps": 4})
