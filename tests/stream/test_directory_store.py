"""Features in files survive kills, full disks and damage, and any reader of safetensors opens them."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import pickle
import random
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.processes import fork, kill, wait
from support.streams import reference

from danling.stream import DirectoryStore


def files(store: DirectoryStore) -> list[Path]:
    return sorted(
        path
        for folder in ("objects", "writing")
        for path in (store.path / folder).rglob("*")
        if path.is_file()
    )


def bytes_of(store: DirectoryStore) -> int:
    return sum(
        path.stat().st_size for path in (store.path / "objects").rglob("*") if path.is_file()
    )


def test_a_stock_reader_opens_an_object(tmp_path: Path) -> None:
    tensors = {"hidden": torch.randn(3, 4).bfloat16(), "mask": torch.tensor([True, False])}
    DirectoryStore(tmp_path).put("a", tensors)
    (file,) = tmp_path.rglob("*.safetensors")
    found = load_file(file)
    assert file.name == "a.safetensors" and set(found) == {"hidden", "mask"}
    assert torch.equal(found["hidden"], tensors["hidden"]) and torch.equal(
        found["mask"], tensors["mask"]
    )
    umask = os.umask(0o022)
    os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


NAMES = [
    "a",
    "a/b",
    "../a",
    ".",
    "..",
    ".hidden",
    "~a",
    "%2E",
    "%252E",
    "ü\n\0",
    "a" * 300,
    "a" * 301,
    "A",
    "prompt 7",
    "\udc80",
    "-",
]


def test_any_string_names_an_object_of_its_own(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    for value, name in enumerate(NAMES):
        store.put(name, {"x": torch.tensor(value)})
    for value, name in enumerate(NAMES):
        assert store.get(reference(name, {"x": torch.tensor(0)}))["x"].item() == value
    assert [path.name for path in tmp_path.iterdir()] == ["store"] and len(files(store)) == len(
        NAMES
    )
    store.discard(NAMES)
    assert store.usage() == 0 and files(store) == []


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.uint64, torch.float8_e5m2])
def test_further_dtypes_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    store, tensor = (
        DirectoryStore(tmp_path),
        torch.arange(16, dtype=torch.uint8).repeat(2).view(dtype),
    )
    store.put("a", {"x": tensor})
    found = store.get(reference("a", {"x": tensor}))["x"]
    assert found.dtype is dtype and torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))


def test_value_outside_the_format_is_refused_by_name_before_any_write(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with pytest.raises(
        TypeError, match=r"in object 'a'. Received: .*'phase' of torch.complex128 \(KeyError"
    ):
        store.put("a", {"x": torch.ones(1), "phase": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(TypeError, match="in object 'a'. Received: '__metadata__'"):
        store.put("a", {"__metadata__": torch.ones(1)})
    assert files(store) == []


def _flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-8],
        lambda data: data[:20],
        lambda data: b"",
        _flip,
        lambda data: bytes(len(data)),
    ],
    ids=["tail", "header", "empty", "bit", "zeros"],
)
def test_a_damaged_object_names_sample_and_file(tmp_path: Path, damage: object) -> None:
    store, tensors = (
        DirectoryStore(tmp_path),
        {"x": torch.arange(99), "tail": torch.arange(5, dtype=torch.uint8)},
    )
    store.put("a", tensors)
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(
        ValueError,
        match=rf"features of sample 'sample 7' in {file}. Received: a damaged object: .*make the features again",
    ):
        store.get(reference("a", tensors))
    with pytest.raises(
        ValueError, match="Expected object 'a' in .* Received: a damaged object: .*put it again"
    ):
        store.put("a", tensors)
    store.discard(["a"])
    store.put("a", tensors)
    assert torch.equal(store.get(reference("a", tensors))["x"], tensors["x"])


def test_a_file_in_the_place_of_another_is_no_stale_object(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", {"x": torch.ones(1)})
    store.put("b", {"x": torch.zeros(1)})
    os.replace(next(tmp_path.rglob("a.safetensors")), next(tmp_path.rglob("b.safetensors")))
    with pytest.raises(ValueError, match="sample 'sample 7' in .* Received: object 'a'"):
        store.get(reference("b", {"x": torch.ones(1)}))


def test_read_only_store_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match="that a DirectoryStore has written. Received: .*none"
    ):
        DirectoryStore(tmp_path / "none", read_only=True)
    tensors = {"x": torch.ones(3)}
    DirectoryStore(tmp_path / "store").put("a", tensors)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    store = DirectoryStore(tmp_path / "store", read_only=True)
    assert torch.equal(store.get(reference("a", tensors))["x"], tensors["x"])
    assert store.usage() == bytes_of(store)
    for change in (lambda: store.put("b", tensors), lambda: store.discard(["a"])):
        with pytest.raises(PermissionError, match="Received: .*store with read_only=True"):
            change()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_store_is_passed_to_spawned_processes(tmp_path: Path) -> None:
    tensors = {"x": torch.ones(3)}
    store = DirectoryStore(tmp_path, max_bytes=1_000)
    store.put("a", tensors)
    found = pickle.loads(pickle.dumps(store))
    assert (
        torch.equal(found.get(reference("a", tensors))["x"], tensors["x"])
        and found.max_bytes == 1_000
    )


def test_processes_share_one_budget(tmp_path: Path) -> None:
    tensors = {"x": torch.zeros(100)}
    trainer, producer = DirectoryStore(tmp_path), DirectoryStore(tmp_path, max_bytes=2_000)
    trainer.usage()
    producer.put("a", tensors)
    producer.put("b", tensors)
    assert trainer.usage() == producer.usage() == bytes_of(trainer)
    with pytest.raises(BufferError, match="Expected at most 2000 bytes"):
        for index in range(9):
            producer.put(f"c{index}", tensors)
    trainer.discard(["a"])
    producer.put("d", tensors)
    assert trainer.usage() == producer.usage() == bytes_of(trainer) <= 2_000


def test_unreadable_count_is_made_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", {"x": torch.zeros(10)})
    for text in ("", "{", "[]", '{"bytes": 5', '{"bytes": null, "pending": {}}'):
        (tmp_path / "usage.json").write_text(text)
        assert store.usage() == bytes_of(store) > 0
    (tmp_path / "usage.json").write_text(
        json.dumps({"bytes": 7, "pending": {}})
    )  # as a power cut may leave it
    assert DirectoryStore(tmp_path).usage() == bytes_of(store)


def _write_for_ever(store: DirectoryStore, round_: int, said: Path) -> None:
    with said.open("ab", buffering=0) as file:
        for index in itertools.count():
            name = f"{round_}-{index}"
            store.put(
                name, {"x": torch.full((20_000,), float(index)), "y": torch.arange(index % 7)}
            )
            if index % 3 == 0:
                store.discard([name])
            file.write(f"{index}\n".encode())


def test_killed_writer_leaves_whole_objects_and_a_right_count(tmp_path: Path) -> None:
    generator = random.Random(5)
    survivor = DirectoryStore(tmp_path / "store")
    survivor.usage()
    for round_ in range(8):
        log = tmp_path / f"said-{round_}"
        child = fork(_write_for_ever, survivor, round_, log)
        while not log.exists():
            time.sleep(0.001)
        time.sleep(generator.random() / 20)
        assert kill(child) == -9
        assert survivor.usage() == bytes_of(survivor)
        said = [
            int(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
        for index in said:
            tensors = {"x": torch.full((20_000,), float(index)), "y": torch.arange(index % 7)}
            if index % 3:
                found = survivor.get(reference(f"{round_}-{index}", tensors))
                assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
            else:
                with pytest.raises(KeyError):
                    survivor.get(reference(f"{round_}-{index}", tensors))
        for path in (tmp_path / "store" / "objects").rglob("*.safetensors"):
            load_file(path)
        DirectoryStore(tmp_path / "store").usage()
        assert list((tmp_path / "store" / "writing").iterdir()) == []


def test_only_files_of_dead_writers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tensors = DirectoryStore(tmp_path), {"x": torch.ones(3)}
    (tmp_path / "writing" / "of-a-dead-writer").write_bytes(b"half")
    (tmp_path / "writing" / "dead.lock").touch()
    sync = os.fsync

    def sync_beside_another(handle: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        other = DirectoryStore(tmp_path)
        assert (
            other.usage() == 0 and len(files(other)) == 2
        )  # the file that is written, and its lock
        other.put("b", tensors)
        sync(handle)

    monkeypatch.setattr(os, "fsync", sync_beside_another)
    store.put("a", tensors)
    assert [path.name for path in files(store)] == ["a.safetensors", "b.safetensors"]


def test_a_full_disk_leaves_nothing_behind_and_the_store_goes_on_when_there_is_room(
    small_disk: Path,
) -> None:
    store, tensors = DirectoryStore(small_disk / "store"), {"x": torch.ones(50_000)}
    store.put("a", tensors)
    with pytest.raises(
        OSError,
        match="write object 'b' of .* bytes to .*store. Received: No space left.*Free space",
    ) as caught:
        store.put("b", {"x": torch.ones(500_000)})
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in files(store)] == ["a.safetensors"]
    assert store.usage() == bytes_of(store)
    store.discard(["a"])
    store.put("b", {"x": torch.ones(100_000)})
    assert torch.equal(
        store.get(reference("b", {"x": torch.ones(100_000)}))["x"], torch.ones(100_000)
    )


MANY = {str(number): {"x": torch.full((300,), float(number))} for number in range(40)}


def test_many_objects_cost_one_sync_each_and_three_for_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sync, synced = DirectoryStore(tmp_path / "store"), os.fsync, []

    def noted(handle: int) -> None:
        sync(handle)
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    monkeypatch.setattr(os, "fsync", noted)
    store.put_many(MANY)
    names = [place for place in synced if place == str(tmp_path / "store" / "objects")]
    assert (len(synced), len(names), synced[-1]) == (43, 3, names[0])
    assert all(
        torch.equal(store.get(reference(name, tensors))["x"], tensors["x"])
        for name, tensors in MANY.items()
    )
    store.put_many(MANY)  # as a producer repeats itself that was killed
    assert synced[43:] == names[:1] and store.usage() == bytes_of(store)


def test_many_objects_are_stored_as_far_as_the_budget_goes(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    store.put("0", MANY["0"])
    size = store.usage()
    store = DirectoryStore(tmp_path / "store", max_bytes=30 * size)
    with pytest.raises(BufferError, match=r"object '\d+' of"):
        store.put_many(MANY)
    assert 25 * size < store.usage() == bytes_of(store) <= 30 * size
    assert list((tmp_path / "store" / "writing").iterdir()) == []
    with pytest.raises(ValueError, match="Received: '0', which holds other bytes"):
        store.put_many({"0": MANY["1"]})


def _put_and_discard(place: Path, samples: int) -> None:
    store = DirectoryStore(place, max_bytes=20_000)
    gc.freeze()  # what earlier tests have left stays open here
    descriptors = len(os.listdir("/proc/self/fd"))
    tensors = {"x": torch.ones(4)}
    memory = 0
    for index in range(samples):
        store.put(f"object-{index}", tensors)
        if index % 50 == 49:
            store.discard(f"object-{number}" for number in range(index - 49, index + 1))
        if index == samples // 5:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert store.usage() == 0 and files(store) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 30_000  # KiB


@pytest.mark.parametrize("samples", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_samples_leave_no_byte_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    monkeypatch.setattr(
        os, "fsync", lambda handle: None
    )  # which takes the time and has nothing to do with it
    # In a process of its own: in this one, what earlier tests have left open goes meanwhile.
    assert wait(fork(_put_and_discard, tmp_path, samples)) == 0


def test_without_safetensors_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danling.stream.directory_store.find_spec", lambda name: None)
    with pytest.raises(
        ImportError,
        match="'safetensors' to be installed for a DirectoryStore.*`pip install safetensors`",
    ):
        DirectoryStore(tmp_path / "store")
    assert not (tmp_path / "store").exists()
