"""A loader over a stream: whole windows, one position, and nothing freed before a checkpoint is on the disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.streams import Draft, Stopped, assert_same, publish, settings

from danling.config import RunnerConfig
from danling.data import Batch, LoaderContext, Share
from danling.distributed import LocalDomain
from danling.stream import (
    DirectoryStore,
    FeatureDataset,
    FileChannel,
    MemoryChannel,
    MemoryStore,
    Sample,
    StreamLoader,
)
from danling.training import TrainingSession


def stream(samples: int, *, end: bool = True, **meta: Any) -> tuple[MemoryStore, MemoryChannel]:
    store, channel = MemoryStore(), MemoryChannel("a stream")
    publish(store, channel, range(samples), end=end, **meta)
    return store, channel


def runner(interval: int | None = None) -> Any:
    """Return a run that saves, not in the background, every so many updates; `None` saves between passes only."""
    return SimpleNamespace(
        id="a run",
        config=RunnerConfig({"checkpoint": {"async_enabled": False}}),
        is_step_mode=interval is not None,
        checkpoint_interval=interval,
        placement=SimpleNamespace(optimizer=LocalDomain()),
    )


def read(
    loader: StreamLoader,
    accum_steps: int = 1,
    run: Any = None,
    *,
    is_main: bool = True,
    **share: Any,
) -> list[Batch]:
    loader.bind_context(LoaderContext(Share(**share), accum_steps, is_main), run)
    return list(loader.micro_batches(read=True))


def ids_of(batches: list[Batch]) -> list[list[str]]:
    return [[sample.ref.id for sample in batch.data][: batch.samples] for batch in batches]


def as_they_are(samples: list[Sample]) -> list[Sample]:
    """Collate nothing."""
    return samples


# What a rank reads


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("samples", [24, 25, 1, 13])
def test_ranks_read_each_sample_once_and_make_equally_many_micro_batches(
    samples: int, world_size: int
) -> None:
    store, channel = stream(samples)
    ranks = [
        read(
            StreamLoader(store, channel, 2, collate_fn=as_they_are),
            rank=rank,
            world_size=world_size,
            accum_steps=2,
        )
        for rank in range(world_size)
    ]
    assert sorted(int(i) for rank in ranks for ids in ids_of(rank) for i in ids) == list(
        range(samples)
    )
    assert len({tuple((batch.total, batch.closes) for batch in rank) for rank in ranks}) == 1
    for number in range(len(ranks[0])):
        assert sum(rank[number].samples or 0 for rank in ranks) == ranks[0][number].total
    windows = -(-samples // (world_size * 2 * 2))
    assert sum(bool(batch.closes) for batch in ranks[0]) == windows


def test_rank_without_reads_counts_the_same_batches() -> None:
    store, channel = stream(13)
    loader = StreamLoader(store, channel, 2)
    loader.bind_context(LoaderContext(Share(rank=1, world_size=2), 2))
    known = [batch[1:] for batch in loader.micro_batches(read=True)]
    store.discard(ref.object_id for ref in channel.read(0, 13))
    assert [batch[1:] for batch in loader.micro_batches(read=False)] == known


def test_collate_draws_the_same_after_a_resume() -> None:
    def noisy(samples: list[Sample]) -> torch.Tensor:
        return torch.stack([sample["input"] for sample in samples]) + torch.randn(len(samples), 4)

    store, channel = stream(12)
    whole = [
        batch.data
        for batch in read(StreamLoader(store, channel, 2, collate_fn=noisy, retain="all"), seed=3)
    ]
    torch.manual_seed(99)
    resumed = StreamLoader(store, channel, 2, collate_fn=noisy, retain="all", prefetch=0)
    resumed.load_state_dict({"epoch": 0, "consumed": 4, "last_id": "3", "skipped": 0})
    assert torch.equal(
        torch.cat([batch.data for batch in read(resumed, seed=3)]), torch.cat(whole[2:])
    )


def test_a_window_opens_only_when_the_log_holds_all_of_it() -> None:
    store, channel = stream(3, end=False)
    looks: list[int] = []

    class Looking(TrainingSession):
        def asked_to_stop(self) -> bool:
            looks.append(channel.published())
            if len(looks) == 3:
                publish(store, channel, range(3, 6), end=False)
            return False

    loader = StreamLoader(store, channel, 2, collate_fn=as_they_are)
    session = Looking()
    session.running = True
    loader.bind_context(LoaderContext(accum_steps=2, session=session), runner())
    batches = loader.micro_batches(read=True)
    assert ids_of([next(batches)]) == [["0", "1"]]
    assert looks == [3, 3, 3]
    loader.close()


# Errors


def test_a_stream_without_a_sample_is_named(tmp_path: Path) -> None:
    message = "at least one sample in stream a stream. Received: its log is complete without one. See what its producer"
    with pytest.raises(ValueError, match=message), Draft(settings(tmp_path), *stream(0)) as runner:
        runner.train()
    for retain in ("step", "all"):
        with pytest.raises(ValueError, match=message):
            read(StreamLoader(*stream(0), 2, retain=retain), rank=1, world_size=2)


@pytest.mark.parametrize("retain", ["checkpoint", "step"])
def test_unwritable_store_is_refused_before_training_if_features_are_freed(
    tmp_path: Path, retain: Any
) -> None:
    channel = MemoryChannel()
    publish(DirectoryStore(tmp_path / "store"), channel, range(8))
    store = DirectoryStore(tmp_path / "store", read_only=True)
    with (
        pytest.raises(
            ValueError,
            match="store that can be written.*Received: read_only=True, retain='.*Pass retain='all'",
        ),
        Draft(settings(tmp_path), store, channel, retain=retain) as runner,
    ):
        runner.train()
    with Draft(settings(tmp_path), store, channel, retain="all") as runner:
        runner.train()
    assert runner.state.train.global_step == 5


def test_an_idle_log_is_named() -> None:
    store, channel = stream(1, end=False)
    with pytest.raises(
        TimeoutError, match=r"samples 1 to 1 from the producer of stream a stream.*0.01 seconds"
    ):
        read(StreamLoader(store, channel, 2, idle_timeout=0.01))


@pytest.mark.parametrize("kind", ["failed", "stopped"])
def test_failed_producer_is_not_the_end_of_data(kind: str) -> None:
    store, channel = stream(5, end=False)
    channel.end(kind, "ValueError: no more disk")
    loader = StreamLoader(store, channel, 2)
    loader.bind_context(LoaderContext())
    batches = loader.micro_batches(read=True)
    # Whole windows are there for good, so they are trained on; the rest of one is not taken for the last.
    assert [next(batches).samples, next(batches).samples] == [2, 2]
    with pytest.raises(
        RuntimeError, match=rf"it is {kind} after 5 samples, of which 4 .*no more disk.*Start the"
    ):
        next(batches)
    channel.reopen()
    channel.end()
    loader.consumed = 4
    assert [batch.samples for batch in loader.micro_batches(read=True)] == [1]


def test_a_live_log_of_another_run_is_refused_and_a_complete_one_is_left_as_it_is() -> None:
    store, channel = stream(4, end=False)
    channel.claim("one run")
    other = StreamLoader(store, channel, 2)
    with pytest.raises(RuntimeError, match="one run"):
        read(other, run=SimpleNamespace(id="another run"))
    channel.end()
    other = StreamLoader(store, channel, 2)
    assert len(read(other, run=SimpleNamespace(id="another run"))) == 2
    other.commit_state({"epoch": 0, "consumed": 4})
    other.free()
    assert channel.committed() == 0
    assert store.usage() > 0


def test_another_log_than_the_one_trained_on_is_refused() -> None:
    store, channel = stream(6)
    loader = StreamLoader(store, channel, 2)
    loader.load_state_dict({"epoch": 0, "consumed": 4, "last_id": "17", "skipped": 0})
    with pytest.raises(
        ValueError, match="sample '17' at place 3. Received: sample '3' in a stream"
    ):
        read(loader)
    loader.load_state_dict({"epoch": 0, "consumed": 9, "last_id": "17", "skipped": 0})
    with pytest.raises(ValueError, match="Received: a log of 6 samples"):
        read(loader)


def test_an_older_checkpoint_than_the_last_one_says_how_many_samples_are_gone() -> None:
    store, channel = stream(8)
    channel.commit(6)
    older = StreamLoader(store, channel, 2)
    older.load_state_dict({"epoch": 0, "consumed": 2, "last_id": "1", "skipped": 0})
    with pytest.raises(
        RuntimeError,
        match=r"from sample 2 on.*4 samples less.*before 6 were freed.*latest checkpoint",
    ):
        read(older)


@pytest.mark.parametrize("on_gap", ["error", "skip"])
def test_a_kill_between_freeing_and_the_watermark_is_a_gap_too(on_gap: Any) -> None:
    store, channel = stream(12)
    channel.commit(4)
    store.discard(ref.object_id for ref in channel.read(0, 8))
    loader = StreamLoader(store, channel, 2, retain="step", on_gap=on_gap, collate_fn=as_they_are)
    loader.load_state_dict({"epoch": 0, "consumed": 2, "last_id": "1", "skipped": 0})
    if on_gap == "error":
        with pytest.raises(
            RuntimeError, match=r"from sample 2 on.*6 samples less.*before 8 were freed"
        ):
            read(loader)
        return
    assert ids_of(read(loader)) == [["8", "9"], ["10", "11"]]
    assert loader.skipped == 6
    loader.close()


@pytest.mark.parametrize(
    ("retain", "unsaved", "expected"),
    [
        (
            "checkpoint",
            4,
            r"at least 16 samples ahead: these are 4 updates of 4.*max_in_flight=8.*checkpoint.interval",
        ),
        ("checkpoint", None, r"no save within a pass"),
        ("step", 4, None),
        ("all", 4, None),
        ("checkpoint", 2, None),
    ],
)
def test_credit_smaller_than_the_interval_of_saves_is_refused(
    retain: Any, unsaved: int | None, expected: str | None
) -> None:
    store, channel = stream(8, end=False, max_in_flight=8)
    loader = StreamLoader(store, channel, 4, retain=retain)
    loader.bind_context(LoaderContext(), runner(unsaved))
    if expected is None:
        assert next(loader.micro_batches(read=True)).samples == 4
    else:
        with pytest.raises(ValueError, match=expected):
            next(loader.micro_batches(read=True))
    loader.close()


@pytest.mark.parametrize("retain", ["checkpoint", "step"])
def test_producer_without_credit_for_an_update_is_refused_during_the_wait(retain: Any) -> None:
    store, channel = stream(3, end=False, max_in_flight=3)
    loader = StreamLoader(store, channel, 4, retain=retain, idle_timeout=1)
    loader.bind_context(LoaderContext(), runner(1))
    with pytest.raises(ValueError, match=r"at least 4 samples ahead.*max_in_flight=3"):
        next(loader.micro_batches(read=True))
    loader.close()


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"global_batch_size": 0},
        {"retain": "never"},
        {"on_gap": "skip"},
        {"prefetch": -1},
        {"idle_timeout": 0},
    ],
)
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Expected {next(iter(options))}"):
        StreamLoader(MemoryStore(), MemoryChannel(), **{"batch_size": 2, **options})


# Freeing


def test_commit_of_a_thread_is_freed_by_the_reader() -> None:
    store, channel = stream(8)
    loader = StreamLoader(store, channel, 2)
    loader.bind_context(LoaderContext())
    batches = loader.micro_batches(read=True)
    next(batches)
    thread = threading.Thread(target=loader.commit_state, args=({"epoch": 0, "consumed": 6},))
    thread.start()
    thread.join()
    assert channel.committed() == 0
    loader.free()
    assert channel.committed() == 6
    with pytest.raises(KeyError):
        store.get(channel.read(5, 6)[0])
    assert store.get(channel.read(6, 7)[0])
    loader.close()


def test_only_one_process_frees() -> None:
    store, channel = stream(8)
    loader = StreamLoader(store, channel, 2)
    read(loader, rank=1, world_size=2, is_main=False)
    loader.commit_state({"epoch": 0, "consumed": 8})
    loader.free()
    assert channel.committed() == 0


# In a run


def run(directory: Path, stream: tuple[MemoryStore, MemoryChannel], **options: Any) -> Any:
    """Train on a stream to the end, and return losses and weights."""
    config = settings(directory, **options.pop("config", {}))
    with Draft(config, *stream, **options) as runner:
        runner.train()
        return runner.end()


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Any]:
    yield run(tmp_path / "whole", stream(19))


@pytest.mark.parametrize(
    ("saves", "stop_at"), [({"async_enabled": False}, 3), ({"backend": "dcp"}, 1)]
)
def test_resumed_run_ends_as_the_uninterrupted_one(
    tmp_path: Path, whole: Any, saves: dict[str, Any], stop_at: int
) -> None:
    found = stream(19)
    config = {"checkpoint": {"interval": 2, **saves}}
    first = Draft(settings(tmp_path / "run", **config), *found, stop_at=stop_at)
    with pytest.raises(Stopped), first:
        first.train()
    last = run(tmp_path / "run", found, config=config)
    before = [(step, loss) for step, loss in first.trace if step < last[0][0][0]]
    assert_same((before + last[0], last[1]), whole)
    assert found[0].usage() == 0
    assert found[1].committed() == 19


class Validated(Draft):
    """Evaluates five samples of a stream of their own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        store, channel = stream(5)
        self.datasets = {"val": FeatureDataset(store, channel.read(0, 5))}


@pytest.mark.parametrize("interval", [5, 50])
def test_finished_stream_ends_the_run_as_its_budget_does(
    tmp_path: Path, interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "danling")
    found, checkpoint = (
        stream(19),
        {"interval": interval, "async_enabled": False, "last_save_model_only": True},
    )
    ends = []
    for steps in (5, 100):
        config = settings(
            tmp_path / str(steps), steps=steps, checkpoint=checkpoint, dataloader={"batch_size": 5}
        )
        with Validated(config, *(found if steps == 100 else stream(19))) as runner:
            runner.train()
            assert (runner.state.train.global_step, runner.state.train.samples) == (5, 19)
            assert runner.results.keys() == {5}
            files = {path.name for path in (tmp_path / str(steps) / "checkpoints").iterdir()}
            ends.append((runner.results, runner.best_score, files, runner.end()[1]))
    assert ends[0][:3] == ends[1][:3]
    assert_same(([], ends[1][3]), ([], ends[0][3]))
    assert found[0].usage() == 0
    assert (
        caplog.text.count("The stream of samples ended at update 5 of 100: the run ends there.")
        == 1
    )
    with Validated(config, *found) as again:
        again.train()
        assert again.state.train.global_step == 5
        assert again.results == ends[1][0]


@pytest.mark.parametrize("steps", [3, 100])
def test_run_with_another_log_leaves_it_unchanged(tmp_path: Path, steps: int) -> None:
    with Draft(settings(tmp_path, steps=steps), *stream(19)) as runner:
        runner.train()
    store, channel = MemoryStore(), MemoryChannel("another stream")
    publish(store, channel, range(100, 119), end=False)
    before = store.usage()
    another = Draft(settings(tmp_path, steps=200), store, channel)
    with (
        pytest.raises(
            ValueError, match=r"Expected the log that this run was trained on.*in another stream"
        ),
        another,
    ):
        another.train()
    assert (store.usage(), channel.committed()) == (before, 0)
    assert channel.claim("a run that has not begun")


def test_runner_without_training_leaves_the_stream_to_its_trainer(tmp_path: Path) -> None:
    with Draft(settings(tmp_path / "run", steps=3), *stream(19)) as runner:
        runner.train()
    store, trainer = MemoryStore(), FileChannel(tmp_path / "log")
    publish(store, trainer, range(19), end=False)
    trainer.claim("its run")
    before = store.usage()
    with Draft(
        settings(tmp_path / "run", steps=3), store, FileChannel(tmp_path / "log")
    ) as looking:
        assert looking.state.train.global_step == 3
    assert (store.usage(), trainer.committed()) == (before, 0)


def test_finished_run_frees_the_remains_of_a_kill(tmp_path: Path) -> None:
    for _ in range(
        2
    ):  # the second time, as if it had been killed between its last checkpoint and the freeing
        store, channel = stream(19)
        with Draft(settings(tmp_path, steps=3), store, channel) as runner:
            runner.train()
        assert channel.committed() == 12
        with pytest.raises(KeyError):
            store.get(channel.read(11, 12)[0])


def test_several_passes_over_kept_features(tmp_path: Path) -> None:
    found = stream(19)
    with Draft(settings(tmp_path, steps=None, epochs=2), *found, retain="all") as runner:
        runner.train()
        assert runner.state.train.global_step == 10
    assert found[0].usage() > 0


def test_pass_left_early_is_followed_by_a_whole_one_if_features_are_kept() -> None:
    loader = StreamLoader(*stream(8), 2, retain="all", collate_fn=as_they_are)
    assert len([batch for batch, _ in zip(loader, range(2))]) == 2
    loader.set_epoch(1)
    assert len(read(loader)) == 4
    loader.close()


def test_without_prefetch_features_are_read_in_the_training_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store may belong to one thread."""
    store, channel = stream(4)
    get, threads = store.get, set()
    monkeypatch.setattr(store, "get", lambda ref: (threads.add(threading.get_ident()), get(ref))[1])
    assert len(read(StreamLoader(store, channel, 2, prefetch=0))) == 2
    assert threads == {threading.get_ident()}


def test_features_are_freed_at_each_step(tmp_path: Path, whole: Any) -> None:
    found = stream(19)
    assert_same(run(tmp_path / "run", found, retain="step"), whole)
    assert found[0].usage() == 0


@pytest.mark.parametrize("on_gap", ["error", "skip"])
def test_a_gap_after_a_crash(tmp_path: Path, on_gap: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = stream(19)
    config = settings(tmp_path, steps=100)
    first = Draft(config, *found, retain="step", on_gap=on_gap, stop_at=3)
    with pytest.raises(Stopped), first:
        first.train()
    second = Draft(config, *found, retain="step", on_gap=on_gap)
    if on_gap == "error":
        with (
            pytest.raises(RuntimeError, match=r"from sample 8 on.*4 samples less.*on_gap='skip'"),
            second,
        ):
            second.train()
        return
    with second:
        second.train()
        loader = second.dataloaders["train"]
        assert loader.skipped == 4
        assert second.state.train.samples == 15
        assert loader.state_dict()["skipped"] == 4
    assert (
        "4 samples behind the checkpoint were freed at their updates; they are skipped (4 in this run"
        in caplog.text
    )


def test_evaluation_reads_a_fixed_list(tmp_path: Path) -> None:
    found, held_out = stream(19), stream(5)

    with Validated(settings(tmp_path / "a"), *found) as runner:
        held = runner.datasets["val"].store.usage()
        runner.train()
        assert "loss" in runner.results[5]["val"]
        assert runner.datasets["val"].store.usage() == held > 0

    class Wrong(Draft):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.dataloaders["val"] = StreamLoader(*held_out, 2)

    with pytest.raises(ValueError, match="stays as it is to evaluate split 'val'.*FeatureDataset"):
        Wrong(settings(tmp_path / "b"), *stream(19))


def test_the_stream_is_among_the_metrics_and_in_the_progress_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "danling")
    found = stream(19)
    size = found[0].usage() // 19
    with Draft(settings(tmp_path, log_interval=1), *found) as runner:
        runner.train()
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    shown = {line["step"]: line for line in lines if "train/stream_bytes" in line}
    assert [shown[step]["train/stream_in_flight"] for step in range(1, 6)] == [19, 19, 11, 11, 3]
    assert [shown[step]["train/stream_bytes"] for step in range(1, 6)] == [
        n * size for n in (19, 19, 11, 11, 3)
    ]
    assert all(line["train/stream_wait_seconds"] >= 0 for line in shown.values())
    assert "in_flight 19" in caplog.text


def test_two_streams_of_a_run_have_metrics_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "danling")
    text, code = stream(8), stream(5)

    class Both(Draft):
        def __init__(self, config: Any) -> None:
            super().__init__(config, *text, retain="all")
            self.dataloaders["train_code"] = StreamLoader(*code, 2, retain="all")

    with Both(settings(tmp_path, epochs=1, steps=None, accum_steps=1, log_interval=1)) as runner:
        runner.train()
    (file,) = tmp_path.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    shown = [line for line in lines if "train/stream_bytes" in line]
    assert {line["train/stream_bytes"] for line in shown} == {text[0].usage()}
    assert {line["train_code/stream_bytes"] for line in shown} == {code[0].usage()}
    assert shown[0]["train/stream_in_flight"] == 8 and shown[0]["train_code/stream_in_flight"] == 5
    assert all(line["train_code/stream_wait_seconds"] >= 0 for line in shown)
    assert "in_flight 13" in caplog.text
