"""Each call to the operating system fails once: what was there stays right, and what failed works the next time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import Crash, FaultyOs
from support.streams import reference

from danling.stream import DirectoryStore, FileChannel, StreamEnd, directory_store, file_channel
from danling.utils import files, locks

MODULES = (file_channel, directory_store, files, locks)
TENSORS = {"x": torch.arange(50.0), "y": torch.tensor(True)}


@contextmanager
def faulty(faults: FaultyOs) -> Iterator[None]:
    """Let all modules that write use an `os` in which a call goes wrong."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(module, "os", faults)
        yield


def calls(make: Callable[[], Callable[[], object]]) -> FaultyOs:
    action, faults = make(), FaultyOs()
    with faulty(faults):
        action()
    return faults


def struck(make: Callable[[], Callable[[], object]], fault: str, at: int) -> bool:
    """Do an action in which a call goes wrong; return whether it came to its end all the same."""
    action, faults = make(), FaultyOs(at, fault)
    with faulty(faults):
        try:
            action()
        except (OSError, Crash):
            assert faults.struck
            return False
    return True


def bytes_of(store: DirectoryStore) -> int:
    return sum(
        path.stat().st_size for path in (store.path / "objects").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize(
    ("what", "fault"),
    [(what, fault) for what in ("put", "discard") for fault in ("enospc", "eio", "crash")]
    + [("put", "half")],
)
def test_a_store_is_right_after_a_fault_at_any_call(tmp_path: Path, fault: str, what: str) -> None:
    places = iter(range(1000))

    def make() -> Callable[[], object]:
        store = DirectoryStore(tmp_path / str(next(places)))
        store.put("before", TENSORS)
        if what == "put":
            return lambda: store.put("a", TENSORS)
        store.put("a", TENSORS)
        return lambda: store.discard(["a", "none"])

    candidates = calls(make).candidates(fault)
    assert candidates
    for number, at in enumerate(candidates, start=1):
        ended = struck(make, fault, at)
        store = DirectoryStore(tmp_path / str(number))
        assert store.usage() == bytes_of(store)
        # The process that has "died" is this one, which still has the lock on its file.
        assert fault == "crash" or list((store.path / "writing").iterdir()) == []
        try:
            there = torch.equal(store.get(reference("a", TENSORS, "a"))["x"], TENSORS["x"])
        except KeyError:
            there = False
        assert not ended or there == (what == "put")
        assert torch.equal(store.get(reference("before", TENSORS, "before"))["x"], TENSORS["x"])
        store.put("a", TENSORS)
        assert torch.equal(store.get(reference("a", TENSORS, "a"))["x"], TENSORS["x"])
        store.discard(["a", "before"])
        assert store.usage() == bytes_of(store) == 0


@pytest.mark.parametrize("fault", ["enospc", "eio", "half", "crash"])
@pytest.mark.parametrize("what", ["append", "end", "reopen"])
def test_a_log_is_right_after_a_fault_at_any_call(tmp_path: Path, fault: str, what: str) -> None:
    places = iter(range(1000))

    def make() -> Callable[[], object]:
        channel = FileChannel(tmp_path / str(next(places)))
        channel.append([reference("before", TENSORS, "before")])
        if what == "reopen":
            channel.end("failed")
        actions: dict[str, Callable[[], Any]] = {
            "append": lambda: channel.append(
                [reference("a", TENSORS, "a"), reference("b", TENSORS, "b")]
            ),
            "end": lambda: channel.end("failed", "why"),
            "reopen": channel.reopen,
        }
        return actions[what]

    candidates = calls(make).candidates(fault)
    assert candidates
    for number, at in enumerate(candidates, start=1):
        ended = struck(make, fault, at)
        channel = FileChannel(tmp_path / str(number))
        found = [ref.id for ref in channel.read(0, 10)]
        allowed = (
            [["before"], ["before", "a"], ["before", "a", "b"]]
            if what == "append"
            else [["before"]]
        )
        assert found in allowed
        assert not ended or found == allowed[-1]
        end = channel.ended()
        assert end in (None, StreamEnd("failed", 1, "why" if what == "end" else ""))
        assert not ended or (end is not None) == (what == "end")
        channel.reopen()
        assert channel.append(
            [
                reference("a", TENSORS, "a"),
                reference("b", TENSORS, "b"),
                reference("c", TENSORS, "c"),
            ]
        ) == 4 - len(found)
        assert [ref.id for ref in FileChannel(tmp_path / str(number)).read(0, 10)] == [
            "before",
            "a",
            "b",
            "c",
        ]


def test_no_descriptor_is_left_open_by_a_fault(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests have left open, and would be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    places = iter(range(1000))

    def make() -> Callable[[], object]:
        store, channel = (
            DirectoryStore(tmp_path / f"s{next(places)}"),
            FileChannel(tmp_path / f"c{next(places)}"),
        )
        return lambda: (
            store.put("a", TENSORS),
            channel.append([reference("a", TENSORS, "a")]),
            store.discard(["a"]),
        )

    for at in calls(make).candidates("enospc"):
        struck(make, "enospc", at)
    assert len(os.listdir("/proc/self/fd")) == before
