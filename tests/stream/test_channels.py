"""Every channel keeps the same promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from danling.stream import (
    FileChannel,
    MemoryChannel,
    RefChannel,
    SampleRef,
    SQLiteChannel,
    StreamEnd,
    TensorSpec,
)

Open = Callable[[], RefChannel]
KINDS = ["memory", "file", "sqlite"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_channel(kind: str, tmp_path: Path) -> Iterator[Open]:
    opened: list[RefChannel] = []
    memory = MemoryChannel("the-name")

    def open_kind() -> RefChannel:
        opened.append(
            FileChannel(tmp_path / "the-name")
            if kind == "file"
            else SQLiteChannel(tmp_path / "the-name.sqlite")
            if kind == "sqlite"
            else memory
        )
        return opened[-1]

    yield open_kind
    for channel in opened:
        channel.close()


def ref(index: int, *, object_id: str = "") -> SampleRef:
    tensors = {"hidden": TensorSpec((index % 5, 4), "bfloat16")}
    return SampleRef(
        f"prompt\n{index} ü",
        object_id or f"object-{index}",
        tensors,
        {"version": index, "of": [None, 0.5]},
    )


def refs(*places: int) -> list[SampleRef]:
    return [ref(index) for index in places]


def test_samples_are_read_in_the_order_of_their_appends(open_channel: Open) -> None:
    channel = open_channel()
    assert channel.published() == 0 and channel.read(0, 10) == [] and channel.ended() is None
    assert channel.append(refs(0, 1, 2)) == 3
    assert channel.append([]) == 0
    assert channel.append(refs(3)) == 1
    for reader in (channel, open_channel()):
        assert reader.published() == 4 and "the-name" in reader.name
        assert reader.read(0, 4) == refs(0, 1, 2, 3)
        assert reader.read(1, 3) == refs(1, 2)
        assert (
            reader.read(3, 100) == refs(3) and reader.read(4, 9) == [] and reader.read(9, 9) == []
        )


def test_open_reader_sees_later_appends(open_channel: Open) -> None:
    producer, reader = open_channel(), open_channel()
    for index in range(5):
        assert reader.published() == index
        producer.append(refs(index))
        assert reader.read(0, 10) == refs(*range(index + 1)) and reader.holds(ref(index).id)
    assert not reader.holds("prompt")


def test_sample_already_in_the_log_is_left_out(open_channel: Open) -> None:
    one, other = open_channel(), open_channel()
    assert one.append(refs(0, 1, 0)) == 2
    assert other.append([ref(1, object_id="elsewhere"), ref(2), ref(2)]) == 1
    assert one.append(refs(0, 1, 2)) == 0
    assert one.read(0, 9) == other.read(0, 9) == refs(0, 1, 2)


def test_the_watermark_moves_forward_only_and_wrong_arguments_are_refused(
    open_channel: Open,
) -> None:
    channel = open_channel()
    channel.append(refs(0, 1, 2))
    for start, stop in ((-1, 2), (3, 2)):
        with pytest.raises(
            ValueError, match=rf"0 <= start <= stop. Received: start={start}, stop={stop}"
        ):
            channel.read(start, stop)
    with pytest.raises(
        ValueError, match="Expected one of complete, failed, stopped.*Received: 'done'"
    ):
        channel.end("done")
    assert channel.committed() == 0
    channel.commit(2)
    channel.commit(1)
    assert channel.committed() == 2 == open_channel().committed()
    for position in (4, -1):
        with pytest.raises(
            ValueError,
            match=f"between 0 and the 3 samples in the log.*the-name.*Received: {position}",
        ):
            channel.commit(position)
    channel.commit(3)
    assert open_channel().committed() == 3


@pytest.mark.parametrize("end", ["complete", "failed", "stopped"])
def test_an_ended_log_takes_no_samples_and_says_why(open_channel: Open, end: str) -> None:
    producer, reader = open_channel(), open_channel()
    producer.append(refs(0, 1))
    producer.end(end, "RuntimeError: what\nhappened")
    assert reader.ended() == producer.ended() == StreamEnd(end, 2, "RuntimeError: what\nhappened")
    reader.end("stopped", "a later one")  # the first end is the cause of the later ones
    assert producer.ended() == StreamEnd(end, 2, "RuntimeError: what\nhappened")
    for channel in (producer, reader, open_channel()):
        with pytest.raises(
            RuntimeError,
            match=f"the-name.*to be open. Received: it is {end} after 2 samples: Runtime",
        ):
            channel.append(refs(2))
    assert reader.read(0, 9) == refs(0, 1)


def test_a_log_goes_on_after_a_failure_and_not_after_its_last_sample(open_channel: Open) -> None:
    producer, reader = open_channel(), open_channel()
    for kind in ("failed", "stopped"):
        producer.append(refs(producer.published()))
        producer.end(kind)
        producer.reopen()
        assert (
            producer.ended() is None and reader.ended() is None and open_channel().ended() is None
        )
    producer.append(refs(2))
    producer.end()
    producer.reopen()
    assert reader.ended() == StreamEnd("complete", 3) == open_channel().ended()
    with pytest.raises(RuntimeError, match="begin another stream"):
        producer.append(refs(3))
    assert reader.read(0, 9) == refs(0, 1, 2)


def test_a_log_is_complete_when_each_of_its_producers_is(open_channel: Open) -> None:
    one, other = open_channel(), open_channel()
    one.append(refs(0))
    one.end(part=0, parts=2)
    one.end(part=0, parts=2)  # started again with nothing left to do
    assert other.ended() is None
    other.append(refs(1))
    other.end("failed", "of memory", part=1, parts=2)
    assert one.ended() == StreamEnd("failed", 2, "of memory")
    other = open_channel()
    other.reopen()
    with pytest.raises(
        ValueError, match="to agree about their number. Received: parts=3, and 2 by another"
    ):
        other.end(part=1, parts=3)
    with pytest.raises(ValueError, match="from 0 to 1. Received: part=2, parts=2"):
        other.end(part=2, parts=2)
    assert one.ended() is None
    other.append(refs(2))
    other.end(part=1, parts=2)
    assert one.ended() == StreamEnd("complete", 3) == open_channel().ended()


def test_a_live_log_belongs_to_one_run_and_a_complete_one_is_read_by_everybody(
    open_channel: Open,
) -> None:
    channel = open_channel()
    channel.append(refs(0))
    assert channel.claim("run-a") and channel.claim("run-a")
    channel.close()
    channel = open_channel()
    with pytest.raises(
        RuntimeError, match="the-name.*the run that began it, run-a. Received: run run-b. Resume"
    ):
        channel.claim("run-b")
    channel.end("failed")
    with pytest.raises(RuntimeError, match="Received: run run-b"):
        channel.claim("run-b")
    assert channel.claim("run-a")
    channel.reopen()
    channel.end()
    channel.close()
    channel = open_channel()
    assert not channel.claim("run-b")
    assert channel.claim("run-a")
    channel.close()


def test_threads_append_and_read_at_once(open_channel: Open) -> None:
    channels = [open_channel() for _ in range(3)]
    errors: list[BaseException] = []

    def produce(worker: int) -> None:
        try:
            for index in range(20):
                channels[worker].append(refs(index, 100 * worker + index))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=produce, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    seen: list[SampleRef] = []
    while any(thread.is_alive() for thread in threads):
        found = channels[0].read(0, 1000)
        assert found[: len(seen)] == seen  # what was read once stays where it is
        seen = found
    for thread in threads:
        thread.join()
    assert not errors
    final = channels[1].read(0, 1000)
    ids = [found.id for found in final]
    assert len(ids) == len(set(ids)) == 60 and final[: len(seen)] == seen
