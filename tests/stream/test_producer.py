"""A producer: what it skips, when it waits, what it refuses, and how it ends."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.streams import Draft, Points, Stopped, Target, frozen_target, settings

from danling.stream import (
    DirectoryStore,
    EqualLengthBatches,
    FeatureProducer,
    FileChannel,
    MemoryChannel,
    MemoryStore,
    SQLiteChannel,
    TensorSpec,
    run_together,
)
from danling.stream.producer import Captured, Production, by_sample, check_like


def captured(number: int, width: int = 4) -> Captured:
    return Captured(str(number), {"x": torch.full((width,), float(number))}, {})


def production(
    store: Any, channel: Any, *samples: Captured, max_in_flight: int | None = None
) -> Production:
    """Return a pass that makes these samples as one batch."""
    return Production(store, channel, iter([list(samples)]), max_in_flight=max_in_flight)


def publish(store: Any, channel: Any, *samples: Captured) -> int:
    """Check and publish samples; return how many were new."""
    way = production(store, channel, *samples)
    assert way.advance() == "made"
    return way.made


def run(way: Production, seconds: float = 1.0) -> bool:
    """Come to the end of a pass, waiting for credit."""
    while (progress := way.advance()) != "done":
        if progress == "waits":
            way.await_credit(seconds)
    return not way.gave_up


# Features


def test_features_are_taken_apart_by_sample() -> None:
    rows = by_sample({"x": torch.arange(6).reshape(2, 3)}, ["a", "b"])
    assert [row["x"].tolist() for row in rows] == [[0, 1, 2], [3, 4, 5]]
    own = [{"x": torch.zeros(2)}, {"x": torch.zeros(5)}]
    assert by_sample(own, ["a", "b"]) == own


class Divided(torch.Tensor):
    """A tensor of which this rank has a part."""

    full_tensor = None


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"x": torch.zeros(3, 2)},
            r"'x' with the 2 samples of the batch.*shape \(3, 2\).*begins with sample 'a'",
        ),
        ({"x": torch.zeros(())}, r"'x' with the 2 samples"),
        ({"x": 3}, r"tensors by name in the batch that begins with sample 'a'. Received: 'x': int"),
        (
            [{"x": torch.zeros(2)}, {"x": None}],
            r"tensors by name in sample 'b'. Received: 'x': NoneType",
        ),
        ([{"x": torch.zeros(2)}], r"for each of 2 samples. Received: 1 items"),
        (torch.zeros(2), r"Received: Tensor"),
        (torch.empty(2, 3, device="meta").unbind(), r"Received: 2 items"),
        (
            {"x": torch.empty(2, 3, device="meta")},
            r"dense, whole tensors by name in the batch.*sample 'a'. Received: 'x': a meta",
        ),
        (
            {"x": torch.zeros(2, 3).as_subclass(Divided)},
            r"whole tensors.*sample 'a'.*'x': a Divided.*full_tensor",
        ),
    ],
)
def test_features_of_a_wrong_form_are_refused(features: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        by_sample(features, ["a", "b"])


@pytest.mark.parametrize("name", ["a/b/../c", '日本語 \u0000\n"', "", "x" * 100_000])
def test_any_id_of_unicode_names_a_sample(tmp_path: Path, name: str) -> None:
    for kind in (FileChannel, SQLiteChannel):
        store, channel = DirectoryStore(tmp_path / "store"), kind(tmp_path / kind.__name__)
        assert publish(store, channel, Captured(name, {"x": torch.ones(0, 2)}, {})) == 1
        assert channel.holds(name) and not channel.holds(name + "x")
        (ref,) = channel.read(0, 2)
        assert ref.id == name and store.get(ref)["x"].shape == (0, 2)
        channel.close()


def test_id_outside_the_format_is_refused_before_the_sample_is_made(tmp_path: Path) -> None:
    class Strange(Target):
        def sample_ids(self, batch: Any) -> list[str]:
            return ["caf\udce9"] * len(batch["id"])

    channel = MemoryChannel()
    with (
        pytest.raises(ValueError, match="valid Unicode"),
        producer(tmp_path, Strange, store=MemoryStore(), channel=channel) as target,
    ):
        target.produce()
    assert target.captured == []


@pytest.mark.parametrize(
    ("sample", "received"),
    [
        (Captured("s", {}, {}), "none"),
        (
            Captured("s", {"x": torch.ones(1)}, {"max_in_flight": 3}),
            "metadata with 'max_in_flight'",
        ),
    ],
)
def test_sample_without_features_or_with_reserved_keys_is_refused(
    sample: Captured, received: str
) -> None:
    with pytest.raises(
        ValueError, match=f"Expected features of sample 's', and metadata.*Received: {received}"
    ):
        publish(MemoryStore(), MemoryChannel(), sample)


def test_unsupported_dtype_is_named_with_its_sample(tmp_path: Path) -> None:
    sample = Captured("s", {"x": torch.zeros(2, dtype=torch.complex128)}, {})
    with pytest.raises(
        TypeError, match="'x' of torch.complex128.*view_as_real. It holds sample 's'"
    ):
        publish(DirectoryStore(tmp_path), MemoryChannel(), sample)


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype)


FIRST = {"h": spec(5, 8), "ids": spec(5, dtype="int64"), "mask": spec(5), "x": spec(2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"h": spec(7, 8), "ids": spec(7, dtype="int64"), "mask": spec(7)}, None),
        (
            {"h": spec(5, 9)},
            r"float32\[5, 8\] as feature 'h' of sample 's'.*width.*Received: float32\[5, 9\]",
        ),
        ({"x": spec(3)}, r"float32\[2\] as feature 'x'.*Received: float32\[3\]"),
        (
            {"h": spec(8)},
            r"float32\[5, 8\] as feature 'h'.*number of dimensions.*Received: float32\[8\]",
        ),
        ({"ids": spec(5)}, r"int64\[5\] as feature 'ids'.*dtype.*Received: float32\[5\]"),
        ({"x": None}, r"float32\[2\] as feature 'x'.*Received: nothing"),
        ({"y": spec(2)}, r"nothing as feature 'y'.*Received: float32\[2\]"),
    ],
)
def test_features_unlike_those_of_the_first_sample_are_refused(
    changes: dict[str, TensorSpec | None], message: str | None
) -> None:
    specs = {name: found for name, found in {**FIRST, **changes}.items() if found is not None}
    if message is None:
        check_like("s", specs, FIRST)
        return
    with pytest.raises(ValueError, match=message):
        check_like("s", specs, FIRST)


# Publishing


@pytest.mark.parametrize("max_bytes", [None, 20])  # 20: the store is full with what was left
@pytest.mark.parametrize("left", [0.0, 1.5])
def test_an_object_left_by_a_kill_is_stored_once(left: float, max_bytes: int | None) -> None:
    store, channel = MemoryStore(max_bytes=max_bytes), MemoryChannel()
    ref = production(store, channel).refer(captured(0))
    store.put(ref.object_id, {"x": torch.full((4,), left)})
    assert publish(store, channel, captured(0)) == 1
    assert store.get(channel.read(0, 1)[0])["x"].tolist() == [0.0] * 4 and store.usage() == 16


def test_two_logs_over_one_store_leave_each_other_their_features() -> None:
    store, logs = MemoryStore(), (MemoryChannel(), MemoryChannel())
    for value, log in enumerate(logs):
        assert publish(store, log, Captured("a", {"x": torch.full((4,), float(value))}, {})) == 1
    assert [store.get(log.read(0, 1)[0])["x"].tolist() for log in logs] == [[0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("bits", [1.0, 1.5])
def test_two_producers_of_one_sample_leave_the_object_of_the_log(bits: float) -> None:
    store, channel = MemoryStore(), MemoryChannel()

    def meanwhile() -> Iterator[list[Captured]]:
        publish(store, channel, captured(1))
        yield [captured(0), Captured("1", {"x": torch.full((4,), bits)}, {}), captured(2)]

    way = Production(store, channel, meanwhile())
    assert way.advance() == "made" and way.made == 2
    assert [ref.id for ref in channel.read(0, 9)] == ["1", "0", "2"] and store.usage() == 3 * 16
    assert all(store.get(ref)["x"][0] == float(ref.id) for ref in channel.read(0, 3))


def test_a_batch_is_published_as_far_as_the_credit_goes() -> None:
    store, channel = MemoryStore(), MemoryChannel()
    way = production(store, channel, *map(captured, range(6)), max_in_flight=4)
    for committed, published in ((1, 4), (5, 5), (5, 6)):
        assert [way.advance(), way.advance()] == ["made", "done" if published == 6 else "waits"]
        assert way.made == channel.published() == published
        channel.commit(min(committed, published))


def test_a_full_store_is_waited_for_while_something_is_in_flight() -> None:
    store, channel = MemoryStore(max_bytes=40), MemoryChannel()
    way = production(store, channel, *map(captured, range(3)))
    while way.advance() == "made":
        pass
    assert channel.published() == 2
    store.discard(ref.object_id for ref in channel.read(0, 2))
    channel.commit(2)
    assert way.advance() == "made"
    with pytest.raises(BufferError, match="40 bytes"):
        publish(MemoryStore(max_bytes=40), MemoryChannel(), captured(0, 400))


class Answering(MemoryChannel):
    """A log whose trainer frees everything right after it was asked how much is in flight."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__("answering")
        self.store = store
        self.asked = False

    def published(self) -> int:
        self.asked = True
        return super().published()

    def committed(self) -> int:
        before, asked, self.asked = super().committed(), self.asked, False
        if asked:
            self.free()
        return before

    def free(self) -> None:
        published = super().published()
        self.store.discard(ref.object_id for ref in self.read(0, published))
        self._move_watermark(published)


def test_credit_returned_during_the_question_is_seen() -> None:
    store = MemoryStore()
    channel = Answering(store)
    assert run(production(store, channel, *map(captured, range(5)), max_in_flight=1))
    assert MemoryChannel.published(channel) == 5


def test_store_emptied_during_the_question_is_seen() -> None:
    channel = MemoryChannel()

    class Emptied(MemoryStore):
        def put(self, object_id: str, tensors: Any) -> None:
            try:
                super().put(object_id, tensors)
            except BufferError:
                self.discard(ref.object_id for ref in channel.read(0, channel.published()))
                channel.commit(channel.published())
                raise

    assert run(production(Emptied(max_bytes=20), channel, *map(captured, range(4))))
    assert channel.published() == 4


def test_producer_without_credit_names_the_stream() -> None:
    way = production(
        MemoryStore(), MemoryChannel("a stream"), captured(0), captured(1), max_in_flight=1
    )
    with pytest.raises(
        TimeoutError, match="trainer of stream a stream.*1 samples in flight.*max_in_flight"
    ):
        run(way, 0.01)
    assert way.waited > 0


def test_a_producer_ends_when_its_stream_is_stopped() -> None:
    channel = MemoryChannel()
    way = production(MemoryStore(), channel, captured(0), captured(1), max_in_flight=1)
    assert way.advance() == "made"
    channel.end("stopped")
    assert not run(way, 60)


# The runner


def producer(tmp_path: Path, kind: type[Target] = Target, **options: Any) -> Target:
    options.setdefault("indices", range(10))
    config = {"dir": str(tmp_path / f"producer{options.get('part', 0)}"), "auto_resume": True}
    return kind({**config, "dataloader": {"batch_size": 4}}, **options)


def test_restarted_producer_captures_only_missing_samples(tmp_path: Path) -> None:
    store, channel = MemoryStore(), MemoryChannel()

    class Failing(Target):
        def capture(self, batch: Any) -> Any:
            if 8 in batch["id"]:
                raise ValueError("no more light")
            return super().capture(batch)

    with (
        pytest.raises(ValueError, match="no more light"),
        producer(tmp_path, Failing, store=store, channel=channel) as failing,
    ):
        failing.produce()
    end = channel.ended()
    assert end is not None and (end.kind, end.published, end.reason) == (
        "failed",
        8,
        "ValueError: no more light",
    )
    with producer(tmp_path, store=store, channel=channel) as target:
        assert target.produce() == 2
        assert target.captured == [8, 9]
        assert target.produce() == 0


@pytest.mark.parametrize("before", [0, 2])
def test_repeated_ids_are_named_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int
) -> None:
    class Numbered(Target):
        def sample_ids(self, batch: Any) -> list[int]:
            return list(range(len(batch["id"])))

    store, channel = MemoryStore(), MemoryChannel("a stream")
    if before:
        with producer(
            tmp_path, Numbered, store=store, channel=channel, indices=range(before), parts=2
        ) as target:
            target.produce()
    assert "more than once" not in caplog.text
    with producer(tmp_path, Numbered, store=store, channel=channel, part=1, parts=2) as target:
        assert target.produce() == 4 - before
    assert (
        "6 samples were left out, since their ids came more than once in the pass: the log of stream a"
        in caplog.text
    )
    assert caplog.text.count("more than once") == 1 and "The last one was '1'" in caplog.text


def test_missing_override_is_named(tmp_path: Path) -> None:
    class Bare(FeatureProducer):
        def __init__(self, **options: Any) -> None:
            super().__init__({"dir": str(tmp_path)}, **options)
            self.model = frozen_target()
            self.datasets = {"predict": [torch.zeros(4)]}

    channel = MemoryChannel()
    with (
        pytest.raises(NotImplementedError, match="Bare to override `sample_ids"),
        Bare(store=MemoryStore(), channel=channel) as bare,
    ):
        bare.produce()
    with pytest.raises(ValueError, match="max_in_flight"):
        Bare(store=MemoryStore(), channel=channel, max_in_flight=0)


# Together


def together(
    tmp_path: Path, *, max_in_flight: int | None, kind: type[Target] = Target, **changes: Any
) -> Any:
    """Train a draft on what a producer makes in the same process; return its end, the store and the log."""
    store, channel = MemoryStore(), MemoryChannel()
    with (
        producer(
            tmp_path,
            kind,
            store=store,
            channel=channel,
            max_in_flight=max_in_flight,
            indices=range(19),
        ) as target,
        Draft(settings(tmp_path / "draft", **changes), store, channel, idle_timeout=5) as draft,
    ):
        run_together(target, draft)
        return draft.end(), store, channel


def test_trainer_ending_first_stops_the_producer_for_now(tmp_path: Path) -> None:
    _, store, channel = together(tmp_path, max_in_flight=8, steps=3)
    assert channel.ended().kind == "stopped"
    assert channel.committed() == 12
    with (
        producer(
            tmp_path, store=store, channel=channel, max_in_flight=8, indices=range(19)
        ) as target,
        Draft(settings(tmp_path / "draft", steps=3), store, channel) as draft,
    ):
        draft.train()
        target.max_in_flight = None
        assert target.produce() == 19 - 12
    assert channel.ended().kind == "complete"


def test_error_of_a_producer_is_the_cause(tmp_path: Path) -> None:
    class Failing(Target):
        def capture(self, batch: Any) -> Any:
            if 8 in batch["id"]:
                raise ValueError("no more light")
            return super().capture(batch)

    with pytest.raises(ValueError, match="no more light"):
        together(tmp_path, max_in_flight=8, kind=Failing)


def test_error_of_a_trainer_is_in_the_log(tmp_path: Path) -> None:
    store, channel = MemoryStore(), MemoryChannel()
    with (
        producer(
            tmp_path, store=store, channel=channel, max_in_flight=8, indices=range(19)
        ) as target,
        Draft(settings(tmp_path / "draft"), store, channel, stop_at=1) as draft,
    ):
        with pytest.raises(Stopped):
            run_together(target, draft)
        assert channel.ended().reason.startswith("its trainer ended with Stopped")


def test_the_trainer_reads_the_channel_of_the_producer(tmp_path: Path) -> None:
    with (
        producer(tmp_path, store=MemoryStore(), channel=MemoryChannel("one")) as target,
        Draft(settings(tmp_path / "draft"), MemoryStore(), MemoryChannel("another")) as draft,
        pytest.raises(ValueError, match="channel of the producer, one.*Received: another"),
    ):
        run_together(target, draft)


def test_producer_logs_its_samples_and_its_waits(tmp_path: Path) -> None:
    store = MemoryStore()
    with producer(tmp_path, store=store, channel=MemoryChannel()) as target:
        target.produce()
    (file,) = tmp_path.rglob("metrics.jsonl")
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["produce/samples"], last["produce/stream_in_flight"]) == (10, 10)
    assert last["produce/stream_bytes"] == store.usage()
    assert last["produce/stream_wait_seconds"] == 0


def produce_on_a_mesh(root: str, stack: str) -> Any:
    """Produce on two ranks: with a target of its own on each, or divided over both."""
    axes: dict[str, Any] = (
        {"stack": "parallel", "parallel": {"axes": {"shard": 2}}} if stack == "fsdp" else {}
    )
    config = {"dir": str(Path(root) / "producer"), "dataloader": {"batch_size": 2}, **axes}
    store, channel = DirectoryStore(Path(root) / "store"), SQLiteChannel(Path(root) / "log.sqlite")
    # Rank 0 finds its first samples in the log, and makes the forward of the divided target all the same.
    with Target(config, indices=range(9), store=store, channel=channel, parts=2) as target:
        made = target.produce()
        return made, target.captured


@pytest.mark.parametrize("stack", ["ddp", "fsdp"])
def test_a_target_on_two_ranks_publishes_each_sample_once(tmp_path: Path, stack: str) -> None:
    store, channel = DirectoryStore(tmp_path / "store"), SQLiteChannel(tmp_path / "log.sqlite")
    with Target(
        {"dir": str(tmp_path / "before"), "dataloader": {"batch_size": 2}},
        indices=range(2),
        store=store,
        channel=channel,
        parts=2,
        part=1,
    ) as target:
        target.produce()
    ranks = run_processes(produce_on_a_mesh, str(tmp_path), stack, world_size=2, timeout=120)
    assert sum(made for made, _ in ranks) == 7
    refs = channel.read(0, channel.published())
    assert sorted(int(ref.id) for ref in refs) == list(range(9))
    points, model = Points(range(9)), frozen_target()
    for ref in refs:
        torch.testing.assert_close(store.get(ref)["target"], model(points[int(ref.id)]["point"]))
    if stack == "fsdp":
        assert len({len(captured) > 0 for _, captured in ranks}) == 1
    channel.close()


def test_a_producer_of_sequences_pads_nothing(tmp_path: Path) -> None:
    lengths = [3, 5, 3, 3, 5, 2, 3]

    class Sequences(FeatureProducer):
        def __init__(self, **options: Any) -> None:
            super().__init__({"dir": str(tmp_path)}, **options)
            self.model = torch.nn.Embedding(9, 4)
            self.datasets = {
                "predict": [{"id": i, "tokens": torch.full((n,), i)} for i, n in enumerate(lengths)]
            }

        def build_datasampler(self, split: str, dataset: Any) -> Any:
            return EqualLengthBatches(lengths, 2)

        def capture(self, batch: Any) -> Any:
            return {"tokens": batch["tokens"], "states": self.model(batch["tokens"])}

    store, channel = MemoryStore(), MemoryChannel()
    with Sequences(store=store, channel=channel) as target:
        assert target.produce() == 7
    refs = channel.read(0, 7)
    assert [ref.id for ref in refs] == ["0", "2", "1", "4", "3", "6", "5"]
    for ref in refs:
        assert store.get(ref)["states"].shape == (lengths[int(ref.id)], 4)


class Unreachable(SQLiteChannel):
    """A log that nothing can be appended to, as for one who is killed between store and log."""

    def append(self, refs: Any) -> int:
        raise OSError("killed")


def produce_until_killed(root: str) -> str:
    """Leave features in the store of which the log knows nothing; return why."""
    config = {"dir": str(Path(root) / "producer"), "dataloader": {"batch_size": 2}}
    store, channel = DirectoryStore(Path(root) / "store"), Unreachable(Path(root) / "log.sqlite")
    with (
        pytest.raises(OSError) as caught,
        Target(config, indices=range(8), store=store, channel=channel) as target,
    ):
        target.produce()
    return str(caught.value)


def test_remains_of_two_ranks_in_the_store_are_found_by_one(tmp_path: Path) -> None:
    assert (
        run_processes(produce_until_killed, str(tmp_path), world_size=2, timeout=100)
        == ["killed"] * 2
    )
    store, channel = DirectoryStore(tmp_path / "store"), SQLiteChannel(tmp_path / "log.sqlite")
    assert len(list((tmp_path / "store").rglob("*.safetensors"))) == 4
    with producer(tmp_path / "again", store=store, channel=channel, indices=range(8)) as target:
        assert target.produce() == 8
    store.discard(ref.object_id for ref in channel.read(0, 8))
    assert store.usage() == 0 and not list((tmp_path / "store").rglob("*.safetensors"))
    channel.close()


class Signalled(Target):
    """Gets a SIGTERM on the last rank in its second batch."""

    def capture(self, batch: Any) -> Any:
        if self.rank == self.world_size - 1 and self.captured:
            signal.raise_signal(signal.SIGTERM)
        return super().capture(batch)


def produce_until_signalled(root: str, stack: str) -> tuple[object, bool, int]:
    """Produce until a signal comes; return the exit code, whether the log is open, and what is in it."""
    axes: dict[str, Any] = (
        {"stack": "parallel", "parallel": {"axes": {"shard": 2}}} if stack == "fsdp" else {}
    )
    config = {"dir": str(Path(root) / "producer"), "dataloader": {"batch_size": 2}, **axes}
    store, channel = DirectoryStore(Path(root) / "store"), SQLiteChannel(Path(root) / "log.sqlite")
    code: object = None
    try:
        with Signalled(config, indices=range(32), store=store, channel=channel) as target:
            target.produce()
    except SystemExit as ended:
        code = ended.code
    return code, channel.ended() is None, channel.published()


@pytest.mark.parametrize(("stack", "world_size"), [("ddp", 1), ("fsdp", 2)])
def test_a_signal_stops_a_producer_and_leaves_the_log_open(
    tmp_path: Path, stack: str, world_size: int
) -> None:
    ranks = run_processes(
        produce_until_signalled, str(tmp_path), stack, world_size=world_size, timeout=100
    )
    for code, is_open, published in ranks:
        assert (code, is_open) == (143, True)
        assert 0 < published < 32
    store, channel = DirectoryStore(tmp_path / "store"), SQLiteChannel(tmp_path / "log.sqlite")
    with producer(tmp_path / "again", store=store, channel=channel, indices=range(32)) as target:
        before = channel.published()
        assert target.produce() == 32 - before
    assert {int(ref.id) for ref in channel.read(0, 99)} == set(range(32))
    channel.close()


class Signalling(SQLiteChannel):
    """Sends its process a SIGTERM while credit is waited for, which is when it is asked for the end; waits of others are long."""

    armed = False

    def ended(self) -> Any:
        if self.armed:
            self.armed = False
            signal.raise_signal(signal.SIGTERM)
        return super().ended()


class Capturing(Target):
    """Notes that it has begun, and gets a SIGTERM on the last rank in its second batch, while the other one waits for credit."""

    in_wait = False

    def capture(self, batch: Any) -> Any:
        features = super().capture(batch)
        if self.rank == 1:
            self.channel.armed = self.in_wait and len(self.captured) > 2
            if not self.in_wait and len(self.captured) > 2:
                signal.raise_signal(signal.SIGTERM)
        return features


def produce_until_signalled_in_a_wait(root: str, in_wait: bool) -> tuple[object, bool, int]:
    """Produce without a trainer; return the exit code, whether the log is open, and what is in it."""
    config = {
        "dir": str(Path(root) / "producer"),
        "dataloader": {"batch_size": 2},
        "stack": "parallel",
        "parallel": {"axes": {"shard": 2}},
    }
    store, channel = DirectoryStore(Path(root) / "store"), Signalling(Path(root) / "log.sqlite")
    code: object = None
    try:
        with Capturing(
            config, indices=range(32), store=store, channel=channel, idle_timeout=20
        ) as target:
            target.in_wait = in_wait
            # With a signal in its forward, the last rank has credit for it.
            target.max_in_flight = None if target.rank == 1 and not in_wait else 4
            target.produce()
    except SystemExit as ended:
        code = ended.code
    return code, channel.ended() is None, channel.published()


@pytest.mark.parametrize("in_wait", [True, False])
def test_a_signal_on_one_rank_of_a_mesh_ends_the_wait_for_credit_of_all(
    tmp_path: Path, in_wait: bool
) -> None:
    ranks = run_processes(
        produce_until_signalled_in_a_wait, str(tmp_path), in_wait, world_size=2, timeout=60
    )
    assert [rank[:2] for rank in ranks] == [(143, True)] * 2
    assert max(rank[2] for rank in ranks) == (4 if in_wait else 6)
    store, channel = DirectoryStore(tmp_path / "store"), SQLiteChannel(tmp_path / "log.sqlite")
    with producer(tmp_path / "again", store=store, channel=channel, indices=range(32)) as target:
        target.produce()
    assert sorted(int(ref.id) for ref in channel.read(0, 99)) == list(range(32))
    channel.close()
