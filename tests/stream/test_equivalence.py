"""Losses and weights are bit for bit the same with every store and log, in one process and in two."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.mooncake import WHY_NOT, lender, mooncake_master
from support.processes import run_processes
from support.streams import Draft, Target, assert_same, settings

from danling.stream import (
    DirectoryStore,
    FeatureStore,
    FileChannel,
    MemoryChannel,
    MemoryStore,
    MooncakeStore,
    RefChannel,
    SQLiteChannel,
    run_together,
)

SAMPLES = 25
WAYS = [
    "directory, file",
    "directory, sqlite",
    pytest.param("mooncake, sqlite", marks=pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)),
]


@pytest.fixture(scope="module")
def mooncake() -> Iterator[tuple[str, str] | None]:
    if WHY_NOT:
        yield None
        return
    with mooncake_master() as addresses, lender(addresses[0], "16MB"):
        yield addresses


def stream(
    way: str, root: Path, mooncake: tuple[str, str] | None
) -> tuple[FeatureStore, RefChannel]:
    """Open a store and a log."""
    if way == "memory":
        return MemoryStore(), MemoryChannel()
    if way.startswith("mooncake"):
        assert mooncake is not None
        store: FeatureStore = MooncakeStore(mooncake[0], metrics=mooncake[1], namespace=root.name)
    else:
        store = DirectoryStore(root / "store")
    return store, FileChannel(root / "log") if way.endswith("file") else SQLiteChannel(
        root / "log.sqlite"
    )


def target(
    root: Path,
    store: FeatureStore,
    channel: RefChannel,
    ahead: int | None,
    kind: type[Target] = Target,
) -> Target:
    """Make a producer that may be so many samples ahead."""
    config = {"dir": str(root / "producer"), "auto_resume": True, "dataloader": {"batch_size": 4}}
    return kind(config, indices=range(SAMPLES), store=store, channel=channel, max_in_flight=ahead)


def produce(
    way: str, root: Path, mooncake: tuple[str, str] | None, kind: type[Target] = Target
) -> int:
    """Produce all, in a process of its own."""
    store, channel = stream(way, root, mooncake)
    with target(root, store, channel, 16, kind) as producer:
        made = producer.produce()
    channel.close()
    store.close()
    return made


def trained(
    root: Path, store: FeatureStore, channel: RefChannel, producer: Target | None = None
) -> Any:
    """Train to the end of the stream, with a producer in this process or without one."""
    with Draft(settings(root / "draft", steps=100), store, channel, idle_timeout=60) as draft:
        run_together(producer, draft) if producer is not None else draft.train()
        end = draft.end()
    assert channel.committed() == channel.published() == SAMPLES
    # What a writer that was killed has reserved in Mooncake is freed later, by its server.
    assert store.usage() == 0 or isinstance(store, MooncakeStore)
    channel.close()
    store.close()
    return end


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("reference")
    store, channel = stream("memory", root, None)
    with target(root, store, channel, None) as producer:
        producer.produce()
    return trained(root, store, channel)


@pytest.mark.parametrize("way", ["memory", *WAYS])
def test_in_one_process(
    way: str, tmp_path: Path, mooncake: tuple[str, str] | None, reference: Any
) -> None:
    store, channel = stream(way, tmp_path, mooncake)
    with target(tmp_path, store, channel, 16) as producer:
        assert_same(trained(tmp_path, store, channel, producer), reference)


@pytest.mark.parametrize("way", WAYS)
def test_in_two_processes(
    way: str, tmp_path: Path, mooncake: tuple[str, str] | None, reference: Any
) -> None:
    with ThreadPoolExecutor(1) as pool:
        producing = pool.submit(run_processes, produce, way, tmp_path, mooncake, world_size=1)
        end = trained(tmp_path, *stream(way, tmp_path, mooncake))
        assert producing.result() == [SAMPLES]
    assert_same(end, reference)
