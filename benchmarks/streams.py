"""What a stream costs: samples and bytes a second from one process to another, and the log at a million samples.

    OMP_NUM_THREADS=1 python benchmarks/streams.py                     # about three minutes
    OMP_NUM_THREADS=1 python benchmarks/streams.py --rounds 3 --samples 100000 --json streams.json

    mooncake_master --rpc_port=50051 --metrics_port=9003 &             # with Mooncake too
    mooncake_client --master_server_address=127.0.0.1:50051 --metadata_server=P2PHANDSHAKE --global_segment_size=2GB --host=127.0.0.1 &
    OMP_NUM_THREADS=1 python benchmarks/streams.py --mooncake 127.0.0.1:50051

A producer in its own process hands the same tensors to this one, which keeps each as its own tensors: through a
`multiprocessing.Queue` (torch shares their memory there, and this process copies it), through files by hand (`torch.save`, a rename,
no sync; and with a sync), and through the stores and logs of the library, which sync every object and every reference, except in
Mooncake. The ways take turns; medians over the rounds. A trainer that computes half as long again as a way needs for the same samples, so
that the producer is the faster one, shows which share of its time it waits for data. The log is written, opened and read with as many
references as `--samples` says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danling.stream import (
    DirectoryStore,
    FeatureStore,
    FileChannel,
    MooncakeStore,
    RefChannel,
    SampleRef,
    SQLiteChannel,
    StreamLoader,
    TensorSpec,
)

Tensors = dict[str, Tensor]
Figures = dict[str, dict[str, float]]

BATCH = 16
"""Samples that a producer appends, and a trainer frees, at once."""

SLOWER = 1.5
"""How long a trainer computes, as a multiple of what handing the samples over takes."""

SIZES = {"16 KiB": (4, 2048, 256), "4 MiB": (1024, 2048, 32)}
"""Tokens, width and number of the samples of one round."""


def sample(tokens: int, width: int) -> Tensors:
    """Return features as of a target model: hidden states in bfloat16, tokens, and a mask."""
    ids = torch.arange(tokens)
    return {"hidden": torch.randn(tokens, width).bfloat16(), "ids": ids, "mask": ids > 0}


def own(tensors: Tensors) -> Tensors:
    """Return copies."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


class Way:
    """One way of handing samples over, an object for each process.

    Args:
        root: Its own directory.
        queue: Leads from the producer to the other.
    """

    def __init__(self, root: Path, queue: Queue[Any]) -> None:
        self.root = root
        self.queue = queue

    def send(self, tensors: Tensors, names: list[str]) -> None:
        """Hand the same tensors over under several names."""
        for _ in names:
            self.queue.put(tensors)

    def receive(self, count: int) -> Iterator[Tensors]:
        """Yield so many samples."""
        for _ in range(count):
            yield own(self.queue.get())


class Files(Way):
    """Files by hand, one a sample, whose names go through the queue."""

    synced = False

    def send(self, tensors: Tensors, names: list[str]) -> None:
        """Write files."""
        for name in names:
            with open(self.root / f"{name}.tmp", "wb") as file:
                torch.save(tensors, file)
                if self.synced:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(self.root / f"{name}.tmp", self.root / name)
            self.queue.put(name)

    def receive(self, count: int) -> Iterator[Tensors]:
        """Read and remove files."""
        for _ in range(count):
            file = self.root / self.queue.get()
            yield torch.load(file)
            file.unlink()


class SyncedFiles(Files):
    """The same, on the disk before the name is handed over."""

    synced = True


class Stream(Way):
    """A store and a log."""

    def __init__(
        self, root: Path, queue: Queue[Any], *, channel: str, mooncake: str = "", metrics: str = ""
    ) -> None:
        super().__init__(root, queue)
        self.store: FeatureStore = (
            MooncakeStore(mooncake, metrics=metrics or None, namespace=root.name)
            if mooncake
            else DirectoryStore(root / "s")
        )
        self.channel: RefChannel = (
            FileChannel(root / "log") if channel == "file" else SQLiteChannel(root / "log.sqlite")
        )
        self.read = 0

    def send(self, tensors: Tensors, names: list[str]) -> None:
        """Store objects, and append a batch of references."""
        specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        for start in range(0, len(names), BATCH):
            refs = [SampleRef(name, name, specs) for name in names[start : start + BATCH]]
            for ref in refs:
                self.store.put(ref.object_id, tensors)
            self.channel.append(refs)

    def receive(self, count: int) -> Iterator[Tensors]:
        """Read samples behind each other, and free a batch at a time."""
        stop = self.read + count
        while self.read < stop:
            refs = self.channel.read(self.read, min(self.read + BATCH, stop))
            for ref in refs:
                yield self.store.get(ref)
            if refs:
                self.read += len(refs)
                self.store.discard(ref.object_id for ref in refs)
                self.channel.commit(self.read)
            else:
                time.sleep(0.0005)


def produce(
    make: Callable[[Path, Queue[Any]], Way], root: Path, queue: Queue[Any], orders: Connection
) -> None:
    """Send samples whenever it is told to: tokens, width and names."""
    way = make(root, queue)
    orders.send("ready")
    while (order := orders.recv()) is not None:
        tokens, width, names = order
        tensors = sample(tokens, width)
        orders.send("go")
        way.send(tensors, names)


class Pair:
    """A producer in its own process, and the other end here."""

    def __init__(self, make: Callable[[Path, Queue[Any]], Way], root: Path) -> None:
        context = multiprocessing.get_context("spawn")
        root.mkdir()
        queue: Queue[Any] = context.Queue()
        self.orders, theirs = context.Pipe()
        self.process = context.Process(
            target=produce, args=(make, root, queue, theirs), daemon=True
        )
        self.process.start()
        self.orders.recv()
        self.way = make(root, queue)
        self.sent = 0

    def seconds(self, tokens: int, width: int, count: int) -> float:
        """Return how long so many samples take, from the first to the last."""
        names = [f"sample-{self.sent + index}" for index in range(count)]
        self.sent += count
        self.orders.send((tokens, width, names))
        self.orders.recv()
        begin = time.perf_counter()
        received = sum(len(tensors["ids"]) == tokens for tensors in self.way.receive(count))
        assert received == count
        return time.perf_counter() - begin

    def waiting(self, tokens: int, width: int, count: int, compute_seconds: float) -> float:
        """Return the share of its time that a trainer waits for data, which computes so long for each batch; for streams only.

        The computing is a pause: that of an accelerator leaves the processor to the producer and to what is read ahead.
        """
        way = self.way
        assert isinstance(way, Stream)
        loader = StreamLoader(way.store, way.channel, BATCH, global_batch_size=BATCH)
        loader.load_state_dict({"epoch": 0, "consumed": way.read, "last_id": "", "skipped": 0})
        names = [f"sample-{self.sent + index}" for index in range(count)]
        self.sent += count
        self.orders.send((tokens, width, names))
        self.orders.recv()
        batches = loader.micro_batches(read=True)
        next(batches)  # until the first one is there: a lower bound
        loader.advance(1)
        begin, waited = time.perf_counter(), 0.0
        for _ in range(count // BATCH - 1):
            time.sleep(compute_seconds)
            loader.commit_state({"epoch": 0, "consumed": loader.consumed})
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            loader.advance(1)
        share = waited / (time.perf_counter() - begin)
        loader.commit_state({"epoch": 0, "consumed": loader.consumed})
        loader.close()
        way.read = loader.consumed
        return share

    def close(self) -> None:
        """End the producer."""
        self.orders.send(None)
        self.process.join()


def throughput(ways: dict[str, Pair], rounds: int) -> Figures:
    """Return samples and bytes a second by way and size; a first round warms up."""
    figures: Figures = {}
    for size, (tokens, width, count) in SIZES.items():
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, pair in ways.items():
                times[name].append(pair.seconds(tokens, width, count))
        nbytes = sum(tensor.nbytes for tensor in sample(tokens, width).values())
        for name, values in times.items():
            median = statistics.median(values[1:])
            figures[f"{size} {name}"] = {
                "samples/s": count / median,
                "MB/s": count * nbytes / median / 1e6,
            }
    return figures


def waiting(ways: dict[str, Pair], rounds: int, figures: Figures) -> Figures:
    """Return the share of its time that a trainer waits, by stream and size, where the producer is the faster one.

    Args:
        ways: The ways, of which those that are streams are measured.
        rounds: How often.
        figures: What `throughput` has found.
    """
    shares: Figures = {}
    for size, (tokens, width, count) in SIZES.items():
        for name, pair in ways.items():
            if isinstance(pair.way, Stream):
                compute = SLOWER * BATCH / figures[f"{size} {name}"]["samples/s"]
                found = [
                    pair.waiting(tokens, width, max(count, 6 * BATCH), compute)
                    for _ in range(rounds)
                ]
                shares[f"trainer, {size} {name}"] = {"waits (%)": 100 * statistics.median(found)}
    return shares


def resident() -> float:
    """Return the memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_of_log(open_channel: Callable[[], RefChannel]) -> tuple[float, float]:
    """Return how much memory a reader of a log takes, and how much more one that looks for an id, in MiB. Called in a fresh process."""
    open_channel().close()  # what the first one imports is not the log's
    before = resident()
    channel = open_channel()
    channel.published()
    reads = resident() - before
    channel.holds("prompt-7")
    known = resident() - before
    channel.close()
    return reads, known


def log_at(samples: int, open_channel: Callable[[], RefChannel], rounds: int) -> dict[str, float]:
    """Return what a log costs with so many references."""
    specs = {"hidden": TensorSpec((2048, 4096), "bfloat16"), "ids": TensorSpec((2048,), "int64")}

    def refs(start: int, stop: int) -> list[SampleRef]:
        return [
            SampleRef(f"prompt-{index}", f"{index:040x}", specs, {"version": 1})
            for index in range(start, stop)
        ]

    def timed(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    channel = open_channel()
    first = statistics.median(
        timed(partial(channel.append, refs(BATCH * i, BATCH * (i + 1)))) for i in range(rounds)
    )
    filled = timed(
        lambda: [
            channel.append(refs(start, min(start + 10_000, samples)))
            for start in range(BATCH * rounds, samples, 10_000)
        ]
    )
    channel.close()
    # In its own process: this one may give back or take again what others have used before.
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        held, ids = fresh.apply(memory_of_log, (open_channel,))
    reader = open_channel()
    opened = timed(reader.published)
    read = [
        timed(partial(reader.read, place, place + 256))
        for place in range(0, samples, max(samples // rounds, 1))
    ]
    known = timed(lambda: reader.holds("prompt-7"))
    stop = reader.published()
    last = [
        timed(partial(reader.append, refs(stop + BATCH * i, stop + BATCH * (i + 1))))
        for i in range(rounds)
    ]
    commit = [timed(partial(reader.commit, stop + i)) for i in range(rounds)]
    reader.close()
    return {
        "append 16, empty (ms)": first * 1e3,
        "append 16, full (ms)": statistics.median(last) * 1e3,
        "append, in ten thousands (us a sample)": filled / samples * 1e6,
        "open and count (ms)": opened * 1e3,
        "memory of a reader (MiB)": held,
        "first look for an id (ms)": known * 1e3,
        "memory of a producer (MiB)": ids,
        "read 256 (ms)": statistics.median(read) * 1e3,
        "commit (ms)": statistics.median(commit) * 1e3,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=1_000_000, help="references in the log")
    parser.add_argument(
        "--mooncake", default="", help="host:port of a mooncake_master to which memory is lent"
    )
    parser.add_argument(
        "--metrics", default="", help="host:port of its metrics, by default port 9003"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    makes: dict[str, Callable[[Path, Queue[Any]], Way]] = {
        "queue": Way,
        "files": Files,
        "files, synced": SyncedFiles,
        "directory, file": partial(Stream, channel="file"),
        "directory, sqlite": partial(Stream, channel="sqlite"),
    }
    if options.mooncake:
        makes["mooncake, sqlite"] = partial(
            Stream, channel="sqlite", mooncake=options.mooncake, metrics=options.metrics
        )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        ways = {
            name: Pair(make, root / f"way-{number}")
            for number, (name, make) in enumerate(makes.items())
        }
        figures = throughput(ways, options.rounds)
        for name, one in figures.items():
            print(
                f"{name:30}{one['samples/s']:10.0f} samples/s{one['MB/s']:10.1f} MB/s", flush=True
            )
        shares = waiting(ways, options.rounds, figures)
        for pair in ways.values():
            pair.close()
        for name, one in shares.items():
            print(f"{name:40} waits {one['waits (%)']:5.1f} % of its time", flush=True)
        figures |= shares
        logs: dict[str, Callable[[], RefChannel]] = {
            "file": partial(FileChannel, root / "million"),
            "sqlite": partial(SQLiteChannel, root / "million.sqlite"),
        }
        for name, open_channel in logs.items():
            figures[f"log, {name}"] = log_at(options.samples, open_channel, options.rounds)
            for what, value in figures[f"log, {name}"].items():
                print(f"log of {options.samples}, {name}: {what:42}{value:10.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
