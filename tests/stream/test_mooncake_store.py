"""Features in the memory of a real Mooncake server: leases, pins, duplicates, full memory, and memory that is used again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.mooncake import WHY_NOT, free_ports, lender, mooncake_master
from support.programs import python
from support.streams import reference

from danling.stream import MooncakeStore
from danling.stream.mooncake_store import BufferPool, pack, packed_size, unpack
from danling.stream.store import specs_of

needs_mooncake = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def master() -> Iterator[tuple[str, str]]:
    with mooncake_master() as addresses, lender(addresses[0], "16MB"):
        yield addresses


@pytest.fixture(scope="module")
def opened(master: tuple[str, str]) -> Iterator[MooncakeStore]:
    store = MooncakeStore(master[0], metrics=master[1])
    yield store
    store.close()


@pytest.fixture
def store(opened: MooncakeStore) -> Iterator[MooncakeStore]:
    assert opened.usage() == 0
    yield opened
    opened._store.remove_all(True)


@needs_mooncake
def test_objects_outlive_their_writer_and_another_process_reads_and_frees_them(
    store: MooncakeStore, tmp_path: Path, master: tuple[str, str]
) -> None:
    (tmp_path / "put.py").write_text(
        f"import torch\nfrom danling.stream import MooncakeStore\nstore = MooncakeStore({master[0]!r}, metrics={master[1]!r})\n"
        "for index in range(5):\n    store.put(str(index), {'x': torch.full((1000,), float(index))})\n"
        "print('done', flush=True)\nimport time\ntime.sleep(100)\n"
    )
    with python(tmp_path / "put.py", warm=True) as job:
        job.wait_for_output("done")
        job.kill()
        job.wait()
    for index in range(5):
        tensors = {"x": torch.full((1000,), float(index))}
        assert torch.equal(store.get(reference(str(index), tensors))["x"], tensors["x"])
    assert store.usage() >= 5 * 4000
    store.discard(map(str, range(5)))
    assert store.usage() == 0


@needs_mooncake
def test_recently_read_object_is_freed_all_the_same(store: MooncakeStore) -> None:
    tensors = {"x": torch.ones(100)}
    store.put("a", tensors)
    store.get(reference("a", tensors))
    assert store._store.is_exist(store._key("a")) == 1
    assert (
        store._store.remove(store._key("a")) == -706
    )  # the lease of a process that has read or asked
    store.discard(["a"])
    assert store.usage() == 0
    with pytest.raises(KeyError, match="sample 'sample 7'.*no object 'a'"):
        store.get(reference("a", tensors))


@needs_mooncake
def test_full_memory_is_an_error_at_once_and_pushes_nothing_out(store: MooncakeStore) -> None:
    tensors = {"x": torch.arange(200_000)}
    with pytest.raises(
        BufferError, match="room for object '.*' of 1600.* bytes.*Received: it is full. Lend more"
    ):
        for index in range(100):
            store.put(str(index), tensors)
    assert 8 <= index < 11
    for place in range(index):
        assert torch.equal(store.get(reference(str(place), tensors))["x"], tensors["x"])
    store.discard(["0"])
    store.put("again", tensors)
    assert torch.equal(store.get(reference("again", tensors))["x"], tensors["x"])


@needs_mooncake
def test_two_writers_of_one_name_are_told_apart_although_mooncake_says_nothing(
    store: MooncakeStore, master: tuple[str, str]
) -> None:
    other = MooncakeStore(master[0], metrics=master[1])
    store.put("a", {"x": torch.ones(5)})
    other.put("a", {"x": torch.ones(5)})
    for tensors in ({"x": torch.zeros(5)}, {"x": torch.ones(500)}, {"x": torch.ones(1)}, {}):
        with pytest.raises(ValueError, match="Received: 'a', which holds other bytes"):
            other.put("a", tensors)
    assert torch.equal(other.get(reference("a", {"x": torch.ones(5)}))["x"], torch.ones(5))
    other.close()
    with pytest.raises(ValueError, match="Received: the one at .* after close"):
        other.put("b", {})


@needs_mooncake
def test_partial_object_of_a_killed_writer_is_no_object_and_is_put_again() -> None:
    tensors = {"x": torch.arange(100)}
    with mooncake_master() as (address, metrics):
        store = MooncakeStore(address, metrics=metrics, lend_bytes=16 << 20)
        # What a SIGKILL in the middle of a put leaves: room that is reserved, and a name that is taken.
        assert store._store.batch_put_session_start([store._key("a")], [5000], store._pinned) == [0]
        with pytest.raises(KeyError, match="no object 'a'"):
            store.get(reference("a", tensors))
        store.discard(["a"])
        assert (
            store._store.put(store._key("a"), b"x") == 0
        )  # Mooncake itself says that it has put it, and has not
        with pytest.raises(KeyError, match="no object 'a'"):
            store.get(reference("a", tensors))
        store.put("a", tensors)
        assert torch.equal(store.get(reference("a", tensors))["x"], tensors["x"])
        store.put("a", tensors)
        store.discard(["a"])
        with pytest.raises(KeyError):
            store.get(reference("a", tensors))
        store.close()


@needs_mooncake
def test_read_object_is_not_overwritten_by_the_next_read(store: MooncakeStore) -> None:
    kept = []
    for index in range(20):
        store.put(str(index), {"x": torch.full((1000,), float(index)), "y": torch.tensor(index)})
        found = store.get(reference(str(index), {"x": torch.ones(1000), "y": torch.tensor(0)}))
        kept.append((index, found["x"][10:20] if index % 2 else found["y"]))
    assert all(torch.equal(tensor, torch.full_like(tensor, index)) for index, tensor in kept)


@needs_mooncake
def test_streams_with_names_of_their_own_share_a_server(
    master: tuple[str, str], store: MooncakeStore
) -> None:
    other = MooncakeStore(master[0], namespace="another stream", metrics=master[1])
    store.put("a", {"x": torch.ones(100)})
    other.put("a", {"x": torch.zeros(200)})
    other.discard(["a"])
    assert torch.equal(store.get(reference("a", {"x": torch.ones(100)}))["x"], torch.ones(100))
    other.close()


@needs_mooncake
def test_missing_metrics_are_named(master: tuple[str, str]) -> None:
    (port,) = free_ports(1)
    for address in (f"127.0.0.1:{port}", master[0], "nowhere:x"):
        with pytest.raises(
            ConnectionError,
            match=f"metrics of mooncake_master at {address}. Received: .*Name its host and metrics_port",
        ):
            MooncakeStore(master[0], metrics=address)


@needs_mooncake
def test_missing_server_is_named_at_once() -> None:
    (port,) = free_ports(1)
    start = time.monotonic()
    for address in (f"127.0.0.1:{port}", "nowhere", "127.0.0.1:"):
        with pytest.raises(
            ConnectionError, match=f"Expected mooncake_master at '{address}'. Received: .*Start it"
        ):
            MooncakeStore(address)
    assert time.monotonic() - start < 30  # Mooncake itself tries for 90 seconds


@needs_mooncake
def test_too_little_lent_memory_is_refused() -> None:
    with pytest.raises(
        ValueError, match="no memory or at least 16777216 bytes of it. Received: lend_bytes=1000"
    ):
        MooncakeStore("127.0.0.1:1", lend_bytes=1000)


@needs_mooncake
@pytest.mark.slow  # Mooncake waits some times for an answer
def test_dead_server_is_named_by_an_error() -> None:
    with mooncake_master() as (address, metrics):
        store = MooncakeStore(address, metrics=metrics, lend_bytes=16 << 20)
        store.put("a", {"x": torch.ones(3)})
    for call in (
        lambda: store.put("b", {"x": torch.ones(3)}),
        lambda: store.get(reference("b", {"x": torch.ones(3)})),
        lambda: store.discard(["a"]),
    ):
        with pytest.raises(
            OSError,
            match=f"Mooncake at {address}. Received: its error -[0-9]+. See to it that the master runs",
        ):
            call()
    with pytest.raises(OSError):
        store.usage()
    store.close()


def test_without_mooncake_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake", None)
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)
    with pytest.raises(
        ImportError,
        match="Expected Mooncake to be installed.*`pip install mooncake-transfer-engine-non-cuda`.*libibverbs1",
    ):
        MooncakeStore("127.0.0.1:1")


class Registering:
    """Notes which memory is registered, as the store of Mooncake does."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}

    def register_buffer(self, address: int, size: int) -> int:
        self.memory[address] = size
        return 0

    def unregister_buffer(self, address: int) -> None:
        del self.memory[address]


def test_a_pool_uses_memory_again_and_keeps_no_more_than_it_was_told() -> None:
    store = Registering()
    pool = BufferPool(store, keep_bytes=300_000)
    with pool.lease(65_536) as first, pool.lease(1) as second:
        assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 64 == 0
        places = {first.data_ptr(), second.data_ptr()}
        assert store.memory == dict.fromkeys(places, 65_536)
    with pool.lease(65_537) as third, pool.lease(1_000_000) as fourth, pool.lease(10) as again:
        assert (third.numel(), fourth.numel()) == (
            131_072,
            1_048_576,
        ) and again.data_ptr() in places
    assert sum(store.memory.values()) <= 300_000
    pool.close()
    assert store.memory == {}


def test_any_flipped_bit_is_damage_or_padding() -> None:
    tensors = {"x": torch.arange(6.0).reshape(2, 3), "y": torch.tensor(1)}
    whole = torch.zeros(packed_size("a", specs_of(tensors)), dtype=torch.uint8)
    pack(whole, "a", tensors)
    refused = 0
    for bit in range(8 * whole.numel()):
        memory = whole.clone()
        memory[bit // 8] ^= 1 << bit % 8
        try:
            found = unpack(memory, "a")
        except ValueError:
            refused += 1
        else:
            assert list(found) == list(tensors) and all(
                torch.equal(found[name], tensors[name]) for name in tensors
            )
    assert refused > 8 * (16 + 24 + 8), "at least the beginning and the values"
