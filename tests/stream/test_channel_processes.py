"""Logs that several processes write and read: kills, torn lines, full disks, forks and claims."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.patience import patience
from support.processes import fork, kill, wait

from danling.stream import (
    DirectoryStore,
    FileChannel,
    RefChannel,
    SampleRef,
    SQLiteChannel,
    StreamEnd,
    TensorSpec,
)

Open = Callable[[], RefChannel]
SPEC = {"hidden": TensorSpec((4,), "float32")}


def ref(name: str) -> SampleRef:
    return SampleRef(name, f"object-{name}", SPEC, {"text": "x" * 50})


def ids(channel: RefChannel) -> list[str]:
    return [found.id for found in channel.read(0, 1_000_000)]


@pytest.fixture(params=["file", "sqlite"])
def open_channel(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "file":
        return lambda: FileChannel(tmp_path / "log")
    return lambda: SQLiteChannel(tmp_path / "log.sqlite")


def _append_some(open_channel: Open, producer: int, count: int) -> None:
    channel = open_channel()
    for index in range(count):
        channel.append([ref(f"{producer}-{index}"), ref(f"shared-{index}")])
    channel.end(part=producer, parts=3)


def test_producers_in_several_processes_make_one_log(open_channel: Open) -> None:
    producers = [fork(_append_some, open_channel, producer, 20) for producer in range(3)]
    trainer = open_channel()
    seen: list[str] = []
    end = time.monotonic() + patience(60)
    while trainer.ended() is None and time.monotonic() < end:
        found = ids(trainer)
        assert found[: len(seen)] == seen
        seen = found
    assert [wait(producer) for producer in producers] == [0, 0, 0]
    found = ids(trainer)
    assert trainer.ended() == StreamEnd("complete", 80) and found[: len(seen)] == seen
    assert sorted(found) == sorted(
        {f"{who}-{index}" for who in (0, 1, 2, "shared") for index in range(20)}
    )
    for producer in range(3):
        mine = [name for name in found if name.startswith(f"{producer}-")]
        assert mine == [f"{producer}-{index}" for index in range(20)]


def _append_for_ever(open_channel: Open, round_: int, said: Path) -> None:
    channel = open_channel()
    channel.reopen()
    with said.open("ab", buffering=0) as file:
        for index in itertools.count():
            names = [f"{round_}-{index}-{part}" for part in range(3)]
            assert channel.append([ref(name) for name in names]) == 3
            channel.commit(channel.published() - 1)
            file.write(f"{index}\n".encode())


def test_killed_producer_loses_no_appended_sample(open_channel: Open, tmp_path: Path) -> None:
    generator = random.Random(3)
    trainer = open_channel()
    seen: list[str] = []
    for round_ in range(8):
        said = tmp_path / f"said-{round_}"
        child = fork(_append_for_ever, open_channel, round_, said)
        while not said.exists():
            time.sleep(0.001)
        time.sleep(generator.random() / 20)
        assert kill(child) == -signal.SIGKILL
        done = [
            int(line) for line in said.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        found = ids(trainer)
        expected = [
            f"{round_}-{index}-{part}" for index in range(len(done) + 1) for part in range(3)
        ]
        new = found[len(seen) :]
        assert (
            found[: len(seen)] == seen and new == expected[: len(new)] and len(new) >= 3 * len(done)
        )
        assert trainer.committed() <= len(found) and (
            not done or trainer.committed() >= len(seen) + 3 * len(done) - 1
        )
        assert ids(open_channel()) == found and trainer.published() == len(found)
        assert trainer.append([ref(f"after-{round_}")]) == 1
        seen = [*found, f"after-{round_}"]
        assert ids(trainer) == seen


@pytest.mark.parametrize("cut", [1, 7, 60, -1])
def test_partial_line_of_a_killed_producer_is_no_sample_and_spoils_none(
    tmp_path: Path, cut: int
) -> None:
    channel, reader = FileChannel(tmp_path), FileChannel(tmp_path)
    channel.append([ref("a"), ref("b")])
    line = ref("c").to_json().encode()
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(line[:cut])
    for one in (channel, reader, FileChannel(tmp_path)):
        assert one.published() == 2 and ids(one) == ["a", "b"] and not one.holds("c")
    assert FileChannel(tmp_path).append([ref("b"), ref("d")]) == 1
    assert ids(channel) == ids(reader) == ids(FileChannel(tmp_path)) == ["a", "b", "d"]
    assert [
        json.loads(text)["id"] for text in (tmp_path / "log.jsonl").read_text().splitlines()
    ] == ["a", "b", "d"]


def test_visible_append_is_never_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, reader = FileChannel(tmp_path), FileChannel(tmp_path)
    producer.append([ref("a")])
    monkeypatch.setattr("danling.stream.file_channel._FIRST_LOOK_SECONDS", 0.02)
    write, seen = os.write, []

    def write_half(handle: int, data: memoryview) -> int:
        write(handle, data[: len(data) // 2])
        with pytest.raises(
            TimeoutError,
            match=f"to read {tmp_path / 'lock'} .*by a process that writes. Check whether a",
        ):
            seen.extend(ids(reader))
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="to write 5 samples"):
        patch.setattr(os, "write", write_half)
        producer.append([ref(name) for name in "bcdef"])
    assert seen == [] and ids(reader) == ids(producer) == ["a"]
    assert FileChannel(tmp_path).append([ref("g")]) == 1
    assert ids(reader) == ids(producer) == ids(FileChannel(tmp_path)) == ["a", "g"]


def _append_and_stay(path: Path, said: Path) -> None:
    def sync(handle: int) -> None:
        said.touch()
        signal.pause()

    os.fsync = sync
    FileChannel(path).append([ref("c"), ref("d")])


def test_a_reader_and_its_watermark_go_on_while_a_producer_hangs_in_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danling.stream.file_channel._LATER_LOOK_SECONDS", 0.02)
    log, said = tmp_path / "log", tmp_path / "said"
    FileChannel(log).append([ref("a"), ref("b")])
    reader = FileChannel(log)
    assert reader.published() == 2
    producer = fork(_append_and_stay, log, said)
    try:
        while not said.exists():
            time.sleep(0.001)
        assert reader.published() == 2 and ids(reader) == ["a", "b"] and reader.ended() is None
        reader.commit(2)
        assert FileChannel(log).committed() == 2
        with (
            monkeypatch.context() as patch
        ):  # what was seen before is read without asking for the lock
            patch.setattr("danling.stream.file_channel.shared", None)
            assert [found.id for found in reader.read(0, 2)] == ["a", "b"]
    finally:
        assert kill(producer) == -signal.SIGKILL
    assert ids(reader) == ["a", "b", "c", "d"]


def test_log_is_read_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileChannel(tmp_path).append([ref("a")])

    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert ids(FileChannel(tmp_path)) == ["a"]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "",
        '{"object":1}',
        '{"end":"part"}',
        '{"end":"part","parts":Infinity}',
        '{"end":',
        "\0\0",
    ],
)
def test_invalid_line_is_named_with_its_place(tmp_path: Path, line: str) -> None:
    FileChannel(tmp_path).append([ref("a")])
    log = tmp_path / "log.jsonl"
    size = log.stat().st_size
    log.write_bytes(log.read_bytes() + line.encode() + b"\n" + ref("b").to_json().encode() + b"\n")
    with pytest.raises(
        ValueError, match=f"as one line of JSON at byte {size} of {log}. Received: "
    ):
        FileChannel(tmp_path).published()


def test_a_damaged_sample_is_named_with_its_place(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    channel.append([ref("a"), ref("b"), ref("c")])
    log = tmp_path / "log.jsonl"
    log.write_bytes(
        log.read_bytes()
        .replace(b'"float32"]', b'"float33"]', 2)
        .replace(b'"float33"]', b'"float32"]', 1)
    )
    assert [found.id for found in channel.read(0, 1)] == ["a"]
    with pytest.raises(ValueError, match=f"It is sample 1 of {tmp_path}, which is damaged"):
        channel.read(0, 3)


def test_shortened_log_is_refused(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path)
    channel.append([ref("a"), ref("b")])
    os.truncate(tmp_path / "log.jsonl", 10)
    with pytest.raises(ValueError, match=r"log.jsonl to grow only. Received: 10 bytes after"):
        channel.append([ref("c")])


def test_samples_are_on_the_disk_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = FileChannel(tmp_path)
    synced: list[bytes] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: synced.append((tmp_path / "log.jsonl").read_bytes())
    )
    channel.append([ref("a"), ref("b")])
    assert synced == [
        b"".join(ref(name).to_json(place).encode() + b"\n" for place, name in enumerate("ab"))
    ]
    assert channel.append([ref("a")]) == 0 and len(synced) == 1


def test_stock_readers_read_both_logs(tmp_path: Path) -> None:
    files, database = FileChannel(tmp_path / "log"), SQLiteChannel(tmp_path / "log.sqlite")
    for channel in (files, database):
        channel.append([ref("a"), ref("ü\n")])
        channel.end("failed", "why")
    lines = [json.loads(line) for line in (tmp_path / "log" / "log.jsonl").read_text().splitlines()]
    assert lines[1]["id"] == "ü\n" and lines[1]["tensors"] == {"hidden": [[4], "float32"]}
    assert {key: lines[2][key] for key in ("end", "published", "reason")} == {
        "end": "failed",
        "published": 2,
        "reason": "why",
    }
    stock = sqlite3.connect(f"file:{tmp_path / 'log.sqlite'}?mode=ro", uri=True)
    rows = stock.execute("SELECT place, id, ref FROM samples ORDER BY place").fetchall()
    assert [row[:2] for row in rows] == [(0, "a"), (1, "ü\n")]
    assert [json.loads(row[2]) for row in rows] == lines[:2]
    assert stock.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    stock.close()


def _claim_and_wait(open_channel: Open, pipe: int) -> None:
    channel = open_channel()
    assert channel.claim("run-a")
    os.write(pipe, b".")
    signal.pause()


def test_the_claim_of_a_trainer_ends_with_its_process(open_channel: Open) -> None:
    reader, pipe = os.pipe()
    child = fork(_claim_and_wait, open_channel, pipe)
    assert os.read(reader, 1) == b"."
    os.close(reader)
    os.close(pipe)
    second = open_channel()
    with pytest.raises(
        RuntimeError,
        match=f"to be read by one trainer at a time. Received: one more, in addition to process {child} on",
    ):
        second.claim("run-a")
    assert kill(child) == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="the run that began it, run-a. Received: run run-b"):
        second.claim("run-b")
    assert second.claim("run-a")
    third = open_channel()
    with pytest.raises(RuntimeError, match="one trainer at a time"):
        third.claim("run-a")
    open_channel().end()
    assert not third.claim("run-a")  # complete: it may be read while the trainer reads it
    second.close()
    assert third.claim("run-a")
    third.close()


def _claim_is_refused(channel: RefChannel) -> None:
    with pytest.raises(RuntimeError, match="one trainer at a time"):
        channel.claim("run-a")
    channel.close()


def _append_and_read(channel: RefChannel) -> None:
    assert channel.append([ref("of the child")]) == 1
    assert ids(channel) == ["of the parent", "of the child"]


def test_a_channel_goes_on_on_both_sides_of_a_fork(open_channel: Open) -> None:
    channel = open_channel()
    channel.append([ref("of the parent")])
    assert channel.claim("run-a")
    assert wait(fork(_append_and_read, channel)) == 0
    assert wait(fork(_claim_is_refused, channel)) == 0
    _claim_is_refused(open_channel())  # the fork has not given it up
    channel.append([ref("at last")])
    assert ids(channel) == ids(open_channel()) == ["of the parent", "of the child", "at last"]
    channel.close()


def test_forks_during_the_writes_of_a_thread_neither_hang_nor_lose(open_channel: Open) -> None:
    channel = open_channel()
    stop = threading.Event()
    written: list[str] = []

    def write() -> None:
        while not stop.is_set():
            name = f"thread-{len(written)}"
            channel.append([ref(name)])
            written.append(name)

    thread = threading.Thread(target=write)
    thread.start()
    children = [
        fork(lambda index=index: channel.append([ref(f"child-{index}")])) for index in range(5)
    ]
    codes = [wait(child) for child in children]
    stop.set()
    thread.join()
    assert codes == [0] * 5
    found = ids(open_channel())
    assert [name for name in found if name.startswith("thread")] == written
    assert sorted(name for name in found if name.startswith("child")) == [
        f"child-{index}" for index in range(5)
    ]


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_full_disk_leaves_the_log_as_it_was(small_disk: Path, kind: str) -> None:
    channel: RefChannel = (
        FileChannel(small_disk / "log") if kind == "file" else SQLiteChannel(small_disk / "log")
    )
    channel.append([ref("a")])
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    with pytest.raises(
        OSError, match="to write .*samples to .*log.*Received: No space left on device. Free space"
    ) as caught:
        channel.append([ref(str(index)) for index in range(5000)])
    assert caught.value.errno == errno.ENOSPC
    assert ids(channel) == ["a"] and not channel.holds("0")
    filler.unlink()
    assert channel.append([ref("b")]) == 1
    channel.close()
    assert ids(channel) == ["a", "b"]
    channel.close()


def test_file_without_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"garbage" * 1000)
    with pytest.raises(
        ValueError,
        match=f"Expected the log of a stream in {tmp_path / 'log'}. Received: file is not a database",
    ):
        SQLiteChannel(tmp_path / "log")


def test_locked_database_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.stream.sqlite_channel._PATIENCE_SECONDS", 0.05)
    channel = SQLiteChannel(tmp_path / "log")
    other = sqlite3.connect(tmp_path / "log")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(
        TimeoutError, match=f"log of stream {tmp_path / 'log'} to be free within .*End the process"
    ):
        channel.append([ref("a")])
    assert channel.read(0, 1) == []
    other.close()
    assert channel.append([ref("a")]) == 1
    channel.close()


def test_complete_log_is_read_on_a_read_only_disk(small_disk: Path) -> None:
    tensors = {"hidden": torch.arange(4.0)}
    DirectoryStore(small_disk / "store").put("object-a", tensors)
    channel = FileChannel(small_disk / "log")
    channel.append([ref("a")])
    channel.end()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError):
        FileChannel(small_disk / "another")
    store, channel = (
        DirectoryStore(small_disk / "store", read_only=True),
        FileChannel(small_disk / "log"),
    )
    assert not channel.claim("a run") and channel.ended() == StreamEnd("complete", 1)
    assert (
        torch.equal(store.get(channel.read(0, 1)[0])["hidden"], tensors["hidden"])
        and store.usage() > 0
    )


def test_a_fresh_database_is_opened_while_another_process_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = sqlite3.connect(tmp_path / "log", isolation_level=None)
    other.execute(
        "BEGIN IMMEDIATE"
    )  # SQLite refuses a change to the write-ahead log at once, whatever the timeout
    monkeypatch.setattr(time, "sleep", lambda _: other.rollback())
    assert SQLiteChannel(tmp_path / "log").append([ref("a")]) == 1
    other.close()
