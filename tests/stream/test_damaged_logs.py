"""A log that was changed on the disk is never read as another one."""

from __future__ import annotations

import json
import logging
import random
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_outcomes
from support.streams import Draft, Stopped, publish, settings

from danling.stream import (
    DirectoryStore,
    FileChannel,
    RefChannel,
    SampleRef,
    SQLiteChannel,
    TensorSpec,
)


def ref(index: int) -> SampleRef:
    tensors = {"hidden": TensorSpec((index % 5, 4), "bfloat16"), "mask": TensorSpec((7,), "bool")}
    return SampleRef(
        f"prompt {index}",
        f"object-{index}",
        tensors,
        {"version": index, "text": "abc", "of": [None, 0.5]},
    )


def open_log(kind: str, place: Path) -> RefChannel:
    return FileChannel(place) if kind == "file" else SQLiteChannel(place / "log.sqlite")


def make_log(kind: str, place: Path, *, parts: int = 2) -> Path:
    """Write a log that has failed once, went on, and is complete, and return the file that has it."""
    channel = open_log(kind, place)
    channel.append([ref(index) for index in range(12)])
    channel.end("failed", "of memory", part=0, parts=parts)
    channel.reopen()
    channel.append([ref(index) for index in range(12, 20)])
    channel.commit(7)
    for part in range(parts):
        channel.end(part=part, parts=parts)
    channel.close()
    return place / ("log.jsonl" if kind == "file" else "log.sqlite")


def content(kind: str, place: Path) -> Any:
    """Return all that a log says, to a trainer and to a producer that is started again."""
    channel = open_log(kind, place)
    try:
        found = channel.published(), channel.ended(), channel.read(0, 100), channel.committed()
        channel.reopen()
        return *found, [channel.holds(ref(index).id) for index in range(21)]
    finally:
        channel.close()


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "number"),
    [("file", 1000), ("sqlite", 300), pytest.param("sqlite", 3000, marks=pytest.mark.slow)],
)
def test_no_flipped_bit_of_a_log_is_read_as_something_else(
    tmp_path: Path, kind: str, number: int
) -> None:
    original = tmp_path / "original"
    file = make_log(kind, original)
    expected = content(kind, original)
    bits = file.stat().st_size * 8
    unseen = []
    for bit in random.Random(3).sample(range(bits), number):
        place = tmp_path / f"flipped-{bit}"
        shutil.copytree(original, place)
        flip(place / file.name, bit)
        try:
            found = content(kind, place)
        except ValueError as error:
            assert "Received: " in str(error)
        else:
            if found != expected:
                unseen.append((bit, found))
        shutil.rmtree(place)
    assert unseen == []


def without_checksums(kind: str, file: Path) -> None:
    """Rewrite a log as earlier versions did."""

    def older(line: str) -> str:
        plain = json.loads(line)
        return json.dumps(
            {key: plain[key] for key in plain if key not in ("crc32", "place")},
            separators=(",", ":"),
        )

    if kind == "file":
        file.write_text("".join(older(line) + "\n" for line in file.read_text().splitlines()))
        return
    database = sqlite3.connect(file)
    for place, line in database.execute("SELECT place, ref FROM samples").fetchall():
        database.execute("UPDATE samples SET ref = ? WHERE place = ?", (older(line), place))
    facts = dict(database.execute("SELECT name, value FROM facts"))
    database.execute("DELETE FROM facts WHERE name LIKE 'part %'")
    for name, value in facts.items():
        if name.startswith("part "):
            record = json.loads(value)
            database.execute("INSERT INTO parts VALUES (?, ?)", (record["part"], record["parts"]))
        elif name == "committed":
            database.execute(
                "UPDATE facts SET value = ? WHERE name = ?",
                (str(json.loads(value)["committed"]), name),
            )
        else:
            database.execute("UPDATE facts SET value = ? WHERE name = ?", (older(value), name))
    database.commit()
    database.close()


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_log_without_checksums_is_read_and_named_once(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = make_log(kind, tmp_path)
    with caplog.at_level(logging.INFO, logger="danling"):
        expected = content(kind, tmp_path)
        assert caplog.messages == []
        without_checksums(kind, file)
        assert "crc32" not in file.read_bytes().decode(errors="ignore") or kind == "sqlite"
        assert content(kind, tmp_path) == expected
    assert len(caplog.messages) == 1 and "has lines without a checksum" in caplog.messages[0]


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_log_of_an_earlier_version_continues_with_checksums(tmp_path: Path, kind: str) -> None:
    channel = open_log(kind, tmp_path)
    channel.append([ref(0), ref(1)])
    channel.end("stopped", "by hand")
    channel.close()
    without_checksums(kind, tmp_path / ("log.jsonl" if kind == "file" else "log.sqlite"))
    channel = open_log(kind, tmp_path)
    channel.reopen()
    assert channel.append([ref(1), ref(2)]) == 1
    channel.end()
    assert channel.read(0, 9) == [ref(0), ref(1), ref(2)]
    channel.close()


def remove_sample(kind: str, root: Path, place: int) -> None:
    if kind == "file":
        file = root / "log" / "log.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        del lines[place]
        file.write_bytes(b"".join(lines))
        return
    database = sqlite3.connect(root / "log" / "log.sqlite")
    database.execute("DELETE FROM samples WHERE place = ?", (place,))
    database.commit()
    database.close()


def train(root: Path, kind: str, stop_at: int | None = None) -> list[tuple[int, float]]:
    store, channel = DirectoryStore(root / "store"), open_log(kind, root / "log")
    config = settings(
        root / "run", steps=100, accum_steps=1, checkpoint={"interval": 1, "async_enabled": False}
    )
    with Draft(
        config, store, channel, global_batch_size=8, retain="all", stop_at=stop_at
    ) as runner:
        with suppress(Stopped):
            runner.train()
        return runner.trace


@pytest.mark.parametrize(
    ("kind", "older", "place", "ranks", "trained"),
    [
        pytest.param(*log, ranks, trained, marks=pytest.mark.slow if ranks == 2 and log[1] else ())
        for log in (("file", False, 20), ("file", True, 20), ("sqlite", True, 39))
        for ranks in (1, 2)
        for trained in (0, 2)
    ],
)
def test_complete_log_with_a_missing_sample_is_refused_before_an_update(
    tmp_path: Path, kind: str, older: bool, place: int, ranks: int, trained: int
) -> None:
    channel = open_log(kind, tmp_path / "log")
    publish(DirectoryStore(tmp_path / "store"), channel, range(40))
    channel.close()
    if older:
        without_checksums(
            kind, tmp_path / "log" / ("log.jsonl" if kind == "file" else "log.sqlite")
        )
    if trained:  # a run that was stopped, and is resumed with the damaged log
        for outcome in run_outcomes(train, tmp_path, kind, trained, world_size=ranks):
            assert outcome.error is None and {step for step, _ in outcome.value} == set(
                range(trained)
            )
    remove_sample(kind, tmp_path, place)
    outcomes = run_outcomes(train, tmp_path, kind, world_size=ranks)
    assert all(outcome.error is not None for outcome in outcomes)
    cause = next(outcome.error for outcome in outcomes if outcome.rank == 0)
    assert isinstance(cause, ValueError)
    assert "Expected 40 samples in the log of stream" in str(cause)
    assert "Received: 39. The log is damaged." in str(cause)
    files = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("ckpt-s*.pth"))
    assert len(files) == trained


def test_missing_row_in_the_middle_is_refused(tmp_path: Path) -> None:
    for place, expected in (
        (20, "Expected sample 20 .*Received: row 21"),
        (39, "Expected 40 samples.*Received: 39"),
    ):
        channel = SQLiteChannel(tmp_path / f"{place}" / "log" / "log.sqlite")
        channel.append([ref(index) for index in range(40)])
        channel.end()
        channel.close()
        remove_sample("sqlite", tmp_path / f"{place}", place)
        channel = SQLiteChannel(tmp_path / f"{place}" / "log" / "log.sqlite")
        with pytest.raises(ValueError, match=expected):
            channel.read(0, 40)
        channel.close()


def test_missing_line_of_an_open_log_is_refused(tmp_path: Path) -> None:
    """A line carries its place, so that it need not wait for the end of the log."""
    channel = FileChannel(tmp_path / "log")
    channel.append([ref(index) for index in range(10)])
    remove_sample("file", tmp_path, 4)
    reader = FileChannel(tmp_path / "log")
    assert reader.read(0, 4) == [ref(index) for index in range(4)]
    with pytest.raises(
        ValueError, match="it belongs to place 5, so that lines of the log are missing or repeated"
    ):
        reader.read(4, 9)
