"""Both sides in processes of their own, one of which cannot go on: the trainer is much slower, or the disk of the store is full."""

from __future__ import annotations

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.patience import patience
from support.processes import free_port, run_outcomes, run_processes
from support.streams import Draft, Target, assert_same, settings

from danling.stream import DirectoryStore, MemoryChannel, MemoryStore, SQLiteChannel

SAMPLES = 45
AHEAD = 16
"""Samples that the producer may be ahead: four updates."""


def produce(root: Path, store: Path) -> tuple[int, float]:
    """Produce what is not there yet; return how much, and the seconds of a sample that the target takes."""
    channel = SQLiteChannel(root / "log.sqlite")
    seconds: list[float] = []

    class Timed(Target):
        def capture(self, batch: Any) -> Any:
            begin = time.perf_counter()
            features = super().capture(batch)
            seconds.append((time.perf_counter() - begin) / len(batch["id"]))
            return features

    config = {"dir": str(root / "producer"), "auto_resume": True, "dataloader": {"batch_size": 4}}
    options: dict[str, Any] = {"max_in_flight": AHEAD, "idle_timeout": 60}
    with Timed(
        config, indices=range(SAMPLES), store=DirectoryStore(store), channel=channel, **options
    ) as target:
        return target.produce(), min(seconds, default=0.0)


def is_full(channel: SQLiteChannel) -> bool:
    """Whether the producer cannot go on, since it has no credit or nothing more to make."""
    return channel.published() - channel.committed() == AHEAD or channel.ended() is not None


class Slow(Draft):
    """Takes no step before the producer cannot go on, and then a hundred times as long as the target takes for these samples."""

    not_saved = ("most",)

    pause = 0.05

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.most: list[tuple[int, int]] = []

    def train_step(self, data: Any) -> Any:
        loader = self.dataloaders["train"]
        while not is_full(loader.channel):
            time.sleep(0.001)
        time.sleep(self.pause)
        self.most.append(
            (loader.channel.published() - loader.channel.committed(), loader.store.usage())
        )
        return super().train_step(data)


def train_slowly(root: Path, store: Path) -> Any:
    """Train with an idle time-out that is shorter than any step; return its end, and what was in flight."""
    channel = SQLiteChannel(root / "log.sqlite")
    while not is_full(channel):
        time.sleep(0.01)
    with Slow(
        settings(root / "draft", steps=100), DirectoryStore(store), channel, idle_timeout=0.02
    ) as runner:
        runner.train()
        return (
            runner.end(),
            runner.most,
            channel.committed(),
            runner.dataloaders["train"].store.usage(),
        )


def train(root: Path, store: Path) -> Any:
    """Train to the end of the stream."""
    channel = SQLiteChannel(root / "log.sqlite")
    with Draft(
        settings(root / "draft", steps=100), DirectoryStore(store), channel, idle_timeout=60
    ) as runner:
        runner.train()
        return runner.end(), channel.committed(), runner.dataloaders["train"].store.usage()


def alone(root: Path) -> Any:
    """Train in this process on a stream that is complete."""
    store, channel = MemoryStore(), MemoryChannel()
    config = {"dir": str(root / "alone" / "producer"), "dataloader": {"batch_size": 4}}
    with Target(
        config, indices=range(SAMPLES), store=store, channel=channel, max_in_flight=None
    ) as target:
        target.produce()
    with Draft(settings(root / "alone" / "draft", steps=100), store, channel) as runner:
        runner.train()
        return runner.end()


def test_hundred_times_slower_trainer_bounds_the_store_and_ends_bitwise(tmp_path: Path) -> None:
    arguments = (tmp_path, tmp_path / "store")
    run_processes(free_port, world_size=1)
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(run_processes, side, *arguments, world_size=1)
            for side in (train_slowly, produce)
        ]
        ((end, flying, committed, left),), ((made, seconds),) = (
            side.result(timeout=patience(200)) for side in sides
        )
    assert (made, committed, left) == (SAMPLES, SAMPLES, 0)
    # Steps of two samples; the target's own time, without what a busy machine adds to it.
    assert Slow.pause / 2 > 100 * seconds
    samples, size = max(flying)
    assert samples == AHEAD and max(number for number, _ in flying) == AHEAD
    assert max(usage for _, usage in flying) == size
    assert size % AHEAD == 0  # all objects are equally large
    assert all(usage <= number * size // AHEAD for number, usage in flying)
    assert_same(end, alone(tmp_path))


def test_a_full_disk_of_the_store_stops_both_and_they_go_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    arguments, filler = (tmp_path, small_disk / "store"), small_disk / "filler"
    DirectoryStore(small_disk / "store").usage()
    with filler.open("wb") as file:
        # Six objects of a page each: fewer than are trained on until a save lets some go.
        file.write(
            bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize - 6 * 4096)
        )
    run_processes(free_port, world_size=1)
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(run_outcomes, side, *arguments, world_size=1) for side in (train, produce)
        ]
        (trained,), (produced,) = (side.result(timeout=patience(200)) for side in sides)
    assert isinstance(produced.error, OSError) and produced.error.errno == errno.ENOSPC, produced
    assert "Received: No space left on device. Free space" in str(produced.error)
    channel = SQLiteChannel(tmp_path / "log.sqlite")
    assert 0 < channel.published() < 8 and channel.committed() == 0
    assert f"after {channel.published()} samples" in str(trained.error)
    assert "Expected the producer of stream" in str(
        trained.error
    ) and "No space left on device" in str(trained.error)
    assert ".." not in str(trained.error).replace(str(tmp_path), "")
    objects = [path for path in (small_disk / "store").rglob("*") if path.suffix == ".safetensors"]
    assert (
        len(objects) >= channel.published()
        and list((small_disk / "store" / "writing").iterdir()) == []
    )

    filler.unlink()
    before = channel.published()
    with ThreadPoolExecutor(2) as pool:
        producing = pool.submit(run_processes, produce, *arguments, world_size=1)
        # The failure stays in the log until the producer has opened it again.
        while channel.ended() is not None and not producing.done():
            time.sleep(0.01)
        ((end, committed, left),) = run_processes(train, *arguments, world_size=1)
        ((made, _),) = producing.result(timeout=patience(200))
    assert (before + made, committed, left) == (SAMPLES, SAMPLES, 0)
    assert [int(ref.id) for ref in channel.read(0, 99)] == list(range(SAMPLES))
    channel.close()
    assert_same(([], end[1]), ([], alone(tmp_path)[1]))
