"""What it costs to copy a run to an object store while it trains, beside the client library's own copy of the same files.

    python benchmarks/object_stores.py                      # 250 MB to a server on this machine, half a minute
    python benchmarks/object_stores.py --megabytes 1000 --url s3://bucket/prefix --json remote.json

Saves a state of so many megabytes as a file, and copies it by obstore alone and by the library in turn, several times. The library
reads every file once more, to compare it with its SHA-256 before it goes up, and puts a manifest. Then it trains on one thread, with and
without a copy under way: updates a second, the longest update, and the most memory of the process. Without `--url` it starts localbucket,
which keeps objects on the disk of this machine and takes its share of the processors.
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
from collections.abc import Iterator
from pathlib import Path

import obstore
import torch
from torch import nn

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.distributed import LocalDomain
from danling.remote import RemoteStore, RunLayout, open_store
from danling.remote.mirror import MirrorSettings
from danling.remote.run_mirror import RunMirror

ROUNDS = 5
SECONDS_OF_TRAINING = 4.0


@contextlib.contextmanager
def local_server(directory: Path) -> Iterator[str]:
    """Run localbucket; yield the URL of a bucket of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
            AWS_ENDPOINT_URL=endpoint, AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s", AWS_REGION="none"
        )
        yield "s3://bench"
    finally:
        server.kill()
        server.wait()


class Run:
    """A run directory with a manager that is mirrored.

    Args:
        store: The store.
        directory: The run directory.
        megabytes: Size of its state.
    """

    def __init__(self, store: RemoteStore, directory: Path, megabytes: int) -> None:
        self.state = torch.empty(megabytes * 2**18)
        self.manager = FileCheckpointManager(
            directory / "checkpoints",
            domain=LocalDomain(),
            run_id="run",
            settings=CheckpointSettings(async_mode="disabled", keep_latest_k=1),
            step_mode=True,
        )
        layout = RunLayout("bench", secrets.token_hex(8))
        settings = MirrorSettings(keep_latest_k=1, seconds_between_lines=1e9)
        copy = RunMirror(store, layout, directory=directory, manager=self.manager, settings=settings)
        copy.begin()
        self.mirror = copy.mirror
        self.step = 0

    def save(self) -> None:
        """Save a state that differs from all before."""
        self.step += 1
        self.state.normal_()
        payload = {"format_version": 1, "model": {"weight": self.state}, "state": {}}
        self.manager.save_checkpoint(payload, epoch=0, global_step=self.step)


def copies(run: Run, store: RemoteStore) -> tuple[list[float], list[float]]:
    """Return MB/s of the client's own copy of a file, and of the library's."""
    plain, ours = [], []
    file = run.manager.directory / "latest.pth"
    for _ in range(ROUNDS):
        run.save()
        begin = time.perf_counter()
        run.manager.wait_for_mirror()
        ours.append(file.stat().st_size / 1e6 / (time.perf_counter() - begin))
        begin = time.perf_counter()
        obstore.put(store._client(), "plain", file, chunk_size=store.settings.part_size, max_concurrency=4)
        plain.append(file.stat().st_size / 1e6 / (time.perf_counter() - begin))
    return plain, ours


def train(run: Run, *, copied: bool) -> tuple[float, float]:
    """Train for a while; return updates a second and the longest update in milliseconds, while copies are under way or none is."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, times, spent = torch.randn(64, 256), list[float](), 0.0
    while spent < SECONDS_OF_TRAINING:
        if copied and not run.mirror.pending():
            run.save()
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        spent += times[-1]
    run.manager.wait_for_mirror()
    return len(times) / spent, max(times) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=250)
    parser.add_argument("--url", help="where to; localbucket on this machine without it")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        server = contextlib.nullcontext(asked.url) if asked.url else local_server(Path(place, "server"))
        with server as url:
            store = open_store(url)
            run = Run(store, Path(place, "run"), asked.megabytes)
            run.save()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            run.manager.wait_for_mirror()
            plain, ours = copies(run, store)
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
            pairs = [(train(run, copied=False), train(run, copied=True)) for _ in range(2)]
            run.manager.close()
    found = {
        "plain_mb_per_second": statistics.median(plain),
        "copied_mb_per_second": statistics.median(ours),
        "share": statistics.median(own / other for own, other in zip(ours, plain)),
        "updates_per_second": statistics.median(alone[0] for alone, _ in pairs),
        "updates_per_second_copied": statistics.median(during[0] for _, during in pairs),
        "longest_update_ms": min(alone[1] for alone, _ in pairs),
        "longest_update_copied_ms": min(during[1] for _, during in pairs),
        "memory_mb": memory,
    }
    for name, value in found.items():
        print(f"{name:28} {value:10.2f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
