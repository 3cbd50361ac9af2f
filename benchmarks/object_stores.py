"""What it costs to copy a run to an object store while it trains, compared with a copy of the same files by the client library.

    python benchmarks/object_stores.py                      # 250 MB to a server on this machine, a minute
    python benchmarks/object_stores.py --megabytes 1000 --url s3://bucket/prefix --json remote.json

Saves a state of so many megabytes as a file, and copies it by obstore alone and by the library in turn, several times. The library
reads every file once more, to compare it with its SHA-256 before it goes up, and puts a manifest. Then it trains on one thread, with and
without a copy under way: updates a second, the longest update, how long a save in the background stops the loop, and the most memory of
the process. Without `--url` it starts localbucket, which keeps objects on the disk of this machine and takes its share of the processors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import obstore
import torch
from torch import nn

import danling as dl
from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.distributed import LocalDomain
from danling.remote.mirror import RunMirror
from danling.remote.store import RemoteStore, open_store
from danling.remote.stored_run import RunLayout, StoredRun

ROUNDS = 5
SECONDS_OF_TRAINING = 4.0


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def local_server(directory: Path) -> Iterator[str]:
    """Run localbucket; yield the URL of a bucket of it."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "localbucket", str(directory), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 30
        while True:
            try:
                request = urllib.request.Request(f"{endpoint}/bench", method="PUT")
                urllib.request.urlopen(request).close()
                break
            except OSError:
                if time.monotonic() > end or server.poll() is not None:
                    raise
                time.sleep(0.05)
        os.environ.update(
            AWS_ENDPOINT_URL=endpoint,
            AWS_ACCESS_KEY_ID="k",
            AWS_SECRET_ACCESS_KEY="s",
            AWS_REGION="none",
        )
        yield "s3://bench"
    finally:
        server.kill()
        server.wait()


class Run:
    """A run directory with a manager that saves in the background.

    Args:
        store: Where saves are copied to; `None` copies none.
        directory: The run directory.
        megabytes: Size of its state.
    """

    def __init__(self, store: RemoteStore | None, directory: Path, megabytes: int) -> None:
        self.state = torch.empty(megabytes * 2**18)
        self.manager = FileCheckpointManager(
            directory / "checkpoints",
            domain=LocalDomain(),
            run_id="run",
            settings=CheckpointSettings(async_mode="async", keep_latest_k=1),
            step_mode=True,
        )
        self.step = 0
        self._writing = False
        self.manager.after_save = self._written
        if store is not None:
            run = StoredRun(store, RunLayout("bench", secrets.token_hex(8)))
            settings = dl.RunnerConfig({"checkpoint.remote.keep_latest_k": 1}).checkpoint.remote
            mirror = RunMirror(run, self.manager, directory, settings, seconds_between_lines=1e9)
            mirror.open()
            mirror.begin()

    def _written(self, payload: Mapping[str, Any]) -> None:
        self._writing = False

    @property
    def is_busy(self) -> bool:
        """Whether a save is written or copied."""
        return self._writing or (bool(self.manager.copier.pending()))

    def save(self) -> float:
        """Save a state that differs from all before, and return for how many milliseconds the loop stood still."""
        self.step += 1
        self.state.normal_()
        payload = {"format_version": 1, "model": {"weight": self.state}, "state": {}}
        self._writing = True
        begin = time.perf_counter()
        self.manager.save_checkpoint(payload, epoch=0, global_step=self.step)
        return (time.perf_counter() - begin) * 1e3


def copies(run: Run, store: RemoteStore) -> tuple[list[float], list[float]]:
    """Return MB/s of the client's own copy of a file, and of the library's."""
    plain, ours = [], []
    file = run.manager.directory / "latest.pth"
    for _ in range(ROUNDS):
        run.save()
        run.manager.wait()
        begin = time.perf_counter()
        run.manager.wait_for_copies()
        ours.append(file.stat().st_size / 1e6 / (time.perf_counter() - begin))
        begin = time.perf_counter()
        obstore.put(
            store._client, "plain", file, chunk_size=store.settings.part_size, max_concurrency=4
        )
        plain.append(file.stat().st_size / 1e6 / (time.perf_counter() - begin))
    return plain, ours


class Trained(NamedTuple):
    """What training was like.

    Attributes:
        updates: A second.
        longest: The longest update, in milliseconds.
        stop: For how many milliseconds a save stopped the loop, in the median.
    """

    updates: float
    longest: float
    stop: float


def train(run: Run | None) -> Trained:
    """Train for a while, without saves or with one after the other: each begins when the one before is written and copied."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, times, stops, spent = torch.randn(64, 256), list[float](), list[float](), 0.0
    while spent < SECONDS_OF_TRAINING:
        if run is not None and not run.is_busy:
            stops.append(run.save())
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        spent += times[-1]
    if run is not None:
        run.manager.wait()
        run.manager.wait_for_copies()
    return Trained(len(times) / spent, max(times) * 1e3, statistics.median(stops) if stops else 0.0)


def copied(place: Path, url: str, megabytes: int) -> dict[str, float]:
    """Return what it costs to copy saves of a file."""
    store = open_store(url)
    run, uncopied = Run(store, place / "run", megabytes), Run(None, place / "uncopied", megabytes)
    run.save()
    run.manager.wait()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run.manager.wait_for_copies()
    plain, ours = copies(run, store)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
    rounds = [(train(None), train(uncopied), train(run)) for _ in range(2)]
    run.manager.close()
    uncopied.manager.close()
    found = {
        "plain_mb_per_second": statistics.median(plain),
        "copied_mb_per_second": statistics.median(ours),
        "share": statistics.median(own / other for own, other in zip(ours, plain)),
        "memory_mb": memory,
    }
    for index, kind in enumerate(("alone", "saved", "copied")):
        found[f"updates_per_second_{kind}"] = statistics.median(
            each[index].updates for each in rounds
        )
        found[f"longest_update_{kind}_ms"] = min(each[index].longest for each in rounds)
        if index:
            found[f"stop_{kind}_ms"] = statistics.median(each[index].stop for each in rounds)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=250)
    parser.add_argument("--url", help="where to; localbucket on this machine without it")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        server = (
            contextlib.nullcontext(asked.url) if asked.url else local_server(Path(place, "server"))
        )
        with server as url:
            found = copied(Path(place), url, asked.megabytes)
    for name, value in found.items():
        print(f"{name:28} {value:10.2f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
