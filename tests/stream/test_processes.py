"""A producer and a trainer in processes of their own: bitwise as one that was left alone, whichever is killed and whenever."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chaos import SEED, report, share
from support.patience import patience
from support.processes import Outcome, ProcessFailure, free_port, run_outcomes, run_processes
from support.streams import Draft, Stopped, Target, assert_same, publish, settings

from danling.stream import DirectoryStore, FileChannel, MemoryChannel, MemoryStore, SQLiteChannel

SAMPLES = 45


def channel_of(root: Path, kind: str) -> Any:
    return SQLiteChannel(root / "log.sqlite") if kind == "sqlite" else FileChannel(root / "log")


def produce(root: Path, kind: str) -> int:
    """Produce all points that are not there yet."""
    config = {"dir": str(root / "producer"), "auto_resume": True, "dataloader": {"batch_size": 4}}
    store, channel = DirectoryStore(root / "store"), channel_of(root, kind)
    with Target(
        config, indices=range(SAMPLES), store=store, channel=channel, max_in_flight=16
    ) as target:
        return target.produce()


def train(root: Path, kind: str, changes: dict[str, Any], pause: float = 0.0) -> Any:
    """Train to the end of the stream, and return what was trained on by update, and the weights."""
    store, channel = DirectoryStore(root / "store"), channel_of(root, kind)

    class Slow(Draft):
        def train_step(self, data: Any) -> Any:
            time.sleep(pause)
            return super().train_step(data)

    config = settings(root / "draft", **{"steps": 100, **changes})
    with Slow(config, store, channel, idle_timeout=60) as runner:
        runner.train()
        return runner.end()


def alone(tmp_path: Path, *, dropout: float = 0.2, **changes: Any) -> Any:
    """Train in this process on a stream that is complete."""
    store, channel = MemoryStore(), MemoryChannel()
    config = {"dir": str(tmp_path / "alone" / "producer"), "dataloader": {"batch_size": 4}}
    with Target(
        config, indices=range(SAMPLES), store=store, channel=channel, max_in_flight=None
    ) as target:
        target.produce()
    config = settings(tmp_path / "alone" / "draft", **{"steps": 100, **changes})
    with Draft(config, store, channel, dropout=dropout) as runner:
        runner.train()
        return runner.end()


def assert_nothing_left(root: Path, kind: str) -> None:
    """Check that the log holds each sample once, in order, and the store nothing."""
    channel = channel_of(root, kind)
    assert [int(ref.id) for ref in channel.read(0, channel.published())] == list(range(SAMPLES))
    assert channel.committed() == SAMPLES
    assert DirectoryStore(root / "store").usage() == 0
    assert [path for path in (root / "store").rglob("*") if path.suffix == ".safetensors"] == []
    channel.close()


class Side:
    """One side of a stream in a process of its own, which can be killed.

    Args:
        pool: Where it is waited for.
        function: What it does.
        arguments: With what.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any
    ) -> None:
        self._stop = threading.Event()
        self._outcome = pool.submit(
            run_outcomes, function, *arguments, world_size=1, timeout=200, stop=self._stop
        )

    def kill(self) -> None:
        self._stop.set()

    @property
    def ended(self) -> bool:
        return self._outcome.done()

    def end(self) -> Outcome:
        (outcome,) = self._outcome.result(timeout=patience(200))
        return outcome


def kill_and_end(
    root: Path, kind: str, changes: dict[str, Any], instants: random.Random, kills: int
) -> tuple[int, Any]:
    """Run both sides, kill one or both at random places of the log, so often at most; return how often, and the trainer's end."""
    done, channel = 0, channel_of(root, kind)

    def progress() -> int:
        return channel.published() + channel.committed()

    with ThreadPoolExecutor(2) as pool:
        start: dict[str, Callable[[], Side]] = {
            "trainer": lambda: Side(pool, train, root, kind, changes, 0.02),
            "producer": lambda: Side(pool, produce, root, kind),
        }
        running = {name: start[name]() for name in start}
        while done < kills:
            mark = min(instants.randint(0, 30) + progress(), 2 * SAMPLES - 1)
            while progress() < mark and not running["trainer"].ended:
                time.sleep(0.002)
            time.sleep(instants.uniform(0, 0.1))
            victims = instants.choice([["trainer"], ["producer"], ["trainer", "producer"]])
            for name in victims:
                running[name].kill()
            ended = {name: running[name].end() for name in victims}
            for outcome in ended.values():
                assert outcome.error is None or isinstance(outcome.error, ProcessFailure), outcome
            done += sum(outcome.error is not None for outcome in ended.values())
            if "trainer" in ended and ended["trainer"].error is None:
                break
            running.update({name: start[name]() for name in victims})
        ends = {name: side.end() for name, side in running.items()}
    channel.close()
    assert ends["trainer"].error is None, ends
    return done, ends["trainer"].value


@pytest.mark.parametrize(
    ("kind", "saves"),
    [
        ("sqlite", {"async_enabled": True}),
        pytest.param("file", {"async_enabled": False}, marks=pytest.mark.slow),
        pytest.param("sqlite", {"backend": "dcp", "async_enabled": True}, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_instants_it_ends_as_the_one_left_alone(
    tmp_path: Path, kind: str, saves: dict[str, Any]
) -> None:
    changes = {"checkpoint": {"interval": 2, **saves}}
    whole, done, wanted = alone(tmp_path, **changes), 0, share(0.07, otherwise=3)
    run_processes(free_port, world_size=1)
    instants = random.Random(f"stream {kind} {SEED}")
    rounds = 0
    while done < wanted:
        root = tmp_path / str(rounds)
        killed, end = kill_and_end(root, kind, changes, instants, min(wanted - done, 6))
        done, rounds = done + max(killed, 1), rounds + 1
        last = dict(end[0])
        assert last.items() <= dict(whole[0]).items()
        assert_same(([], end[1]), ([], whole[1]))
        assert_nothing_left(root, kind)
        report(f"stream, {kind}", killed, 1)


# Several ranks


def train_rank(root: Path, stop_at: int | None) -> Any:
    """Train on a complete log as one of several ranks; return the ids of each update on this rank, the weights, position and samples."""
    store, channel = DirectoryStore(root / "store"), channel_of(root, "sqlite")
    saves = {"interval": 1, "async_enabled": False}
    config = settings(root / "draft", steps=100, accum_steps=1, checkpoint=saves)
    seen: list[tuple[int, str]] = []

    def noting(samples: Any) -> Any:
        seen.extend((runner.state.train.global_step, sample.ref.id) for sample in samples)
        return torch.utils.data.default_collate([dict(sample) for sample in samples])

    options: dict[str, Any] = {"global_batch_size": 12, "collate_fn": noting, "prefetch": 0}
    runner = Draft(config, store, channel, dropout=0.0, stop_at=stop_at, **options)
    with suppress(Stopped), runner:
        runner.train()
    return seen, runner.end()[1], runner.dataloaders["train"].consumed, runner.state.train.samples


def test_from_one_rank_to_two_to_three_the_order_stays(tmp_path: Path) -> None:
    produce_all(tmp_path)
    seen: dict[int, set[str]] = {}
    for world, stop_at in ((1, 1), (2, 2), (3, None)):
        ranks = run_processes(train_rank, tmp_path, stop_at, world_size=world, timeout=120)
        for ids, weights, consumed, samples in ranks:
            for step, sample in ids:
                if stop_at is None or step < stop_at:
                    seen.setdefault(step, set()).add(sample)
            assert all(torch.equal(weights[name], ranks[0][1][name]) for name in weights)
            assert (consumed, samples) == (ranks[0][2], ranks[0][3])
    windows = [range(12), range(12, 24), range(24, 36), range(36, SAMPLES)]
    assert [sorted(map(int, seen[step])) for step in sorted(seen)] == [
        list(window) for window in windows
    ]
    assert (consumed, samples) == (0, SAMPLES)  # at the beginning of a pass that does not come
    assert_nothing_left(tmp_path, "sqlite")
    whole = alone(tmp_path, dropout=0.0, accum_steps=6)[1]
    for name, weight in whole.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


def produce_all(root: Path) -> None:
    """Produce all points, in this process."""
    config = {"dir": str(root / "producer"), "dataloader": {"batch_size": 4}}
    store, channel = DirectoryStore(root / "store"), channel_of(root, "sqlite")
    with Target(
        config, indices=range(SAMPLES), store=store, channel=channel, max_in_flight=None
    ) as target:
        target.produce()
    channel.close()


def signalled_in_a_wait(root: Path, comes: bool) -> tuple[object, int, int]:
    """Get a SIGTERM on the last rank while the log stands still; return the exit code, and updates and position of the checkpoint.

    Args:
        root: Where the stream is.
        comes: Whether what is waited for comes at about the same time.
    """
    store, channel = DirectoryStore(root / "store"), channel_of(root, "sqlite")
    config = settings(root / "draft", steps=100, accum_steps=1, checkpoint={"interval": 50})
    runner = Draft(config, store, channel, global_batch_size=4)
    loader = runner.dataloaders["train"]

    def pump() -> bool:
        # Once the first update is made and the second one is waited for.
        if loader.consumed == 4 and runner.rank == runner.world_size - 1:
            signal.raise_signal(signal.SIGTERM)
        if loader.consumed == 4 and comes and runner.rank == 0 and channel.published() == 6:
            publish(store, channel, range(6, 9), end=False)
        return False

    loader.pump = pump
    code: object = None
    try:
        with runner:
            runner.train()
    except SystemExit as ended:
        code = ended.code
    (latest,) = (root / "draft" / "checkpoints").glob("latest.pth")
    payload = torch.load(latest, weights_only=True)
    return (
        code,
        payload["state"]["train"]["global_step"],
        payload["dataloaders"]["train"]["consumed"],
    )


@pytest.mark.parametrize(("world_size", "comes"), [(1, False), (2, False), (2, True)])
def test_a_signal_ends_a_wait_for_samples_with_a_checkpoint(
    tmp_path: Path, world_size: int, comes: bool
) -> None:
    channel = channel_of(tmp_path, "sqlite")
    publish(DirectoryStore(tmp_path / "store"), channel, range(6), end=False)
    channel.close()
    ranks = run_processes(signalled_in_a_wait, tmp_path, comes, world_size=world_size, timeout=60)
    assert len(set(ranks)) == 1
    assert ranks[0] in ([(143, 1, 4), (143, 2, 8)] if comes else [(143, 1, 4)])
