"""What a save costs the training loop, and what it costs to be sure of what is loaded.

    python benchmarks/checkpoints.py

Saves a state of 200 MB with `torch.save` and with every manager, several times in turn so that a change of the machine's speed
hits all alike, and prints medians. Targets: a save in the background stops the loop for at most 25 % of a bare `torch.save` and
checkpoints are verified at 500 MB/s or more; exits with 1 if one is missed. A run takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from danling.checkpoints import (
    CheckpointManager,
    CheckpointSettings,
    FileCheckpointManager,
    TorchDistributedCheckpointManager,
)
from danling.distributed import LocalDomain

TENSORS, ROUNDS = 50, 5
MEGABYTES = TENSORS * 4 * 2**20 / 1e6


def seconds(action: Callable[[], Any]) -> float:
    """Return how long one call takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def resident() -> float:
    """Return the most memory that this process has had so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def open_managers(directory: Path) -> dict[str, CheckpointManager]:
    """Return one manager of each kind and mode."""
    found: dict[str, CheckpointManager] = {}
    for kind in (FileCheckpointManager, TorchDistributedCheckpointManager):
        for mode in ("disabled", "async"):
            settings = CheckpointSettings(async_mode=mode, keep_latest_k=1)
            name = f"{'file' if kind is FileCheckpointManager else 'dcp'} {'sync' if mode == 'disabled' else 'async'}"
            place = directory / name
            found[name] = kind(place, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True)
    return found


def measure(directory: Path) -> tuple[dict[str, list[float]], float]:
    """Return the seconds by what was done, and the megabytes that a save in the background added to the process."""
    payload = {"format_version": 1, "model": {str(index): torch.randn(2**20) for index in range(TENSORS)}}
    managers = open_managers(directory)
    before = resident()
    managers["file async"].save_checkpoint(payload, epoch=0, global_step=0)
    managers["file async"].wait()
    added = resident() - before
    times: dict[str, list[float]] = {}
    # The first round makes the memory for copies, which later saves use again.
    for step in range(1, ROUNDS + 2):
        times.setdefault("torch.save", []).append(seconds(lambda: torch.save(payload, directory / "bare.pth")))
        for name, manager in managers.items():
            stall = seconds(lambda m=manager, s=step: m.save_checkpoint(payload, epoch=0, global_step=s))  # type: ignore[misc]
            times.setdefault(name, []).append(stall)
            manager.wait()
        for name in ("file sync", "dcp sync"):
            store = managers[name].store
            path = store.path("latest")
            times.setdefault(f"verify {name[:-5]}", []).append(seconds(lambda s=store, p=path: s.verify(p, "full")))  # type: ignore[misc]
    for manager in managers.values():
        manager.close()
    return {name: values[1:] for name, values in times.items()}, added


def main() -> int:
    """Print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    target = parser.parse_args().json
    with tempfile.TemporaryDirectory(dir=".") as directory:
        times, added = measure(Path(directory).absolute())
    medians = {name: statistics.median(values) for name, values in times.items()}
    bare = medians["torch.save"]
    for name, value in medians.items():
        extra = f"{MEGABYTES / value:6.0f} MB/s" if name.startswith("verify") else f"{value / bare:6.0%} of torch.save"
        print(f"{name:12s} {value * 1e3:7.1f} ms  {extra}")
    print(f"{'memory':12s} {added:7.1f} MB added by a save of {MEGABYTES:.0f} MB in the background")
    if target:
        target.write_text(json.dumps({"seconds": medians, "megabytes": MEGABYTES, "megabytes_added": added}))
    slow = [name for name in ("file async", "dcp async") if medians[name] > 0.25 * bare]
    slow += [name for name in medians if name.startswith("verify") and MEGABYTES / medians[name] < 500]
    print(f"missed: {', '.join(slow)}" if slow else "all targets met")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
