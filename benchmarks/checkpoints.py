"""What a save costs the training loop, compared with its lower bound, and what it costs to be sure of what is loaded.

    python benchmarks/checkpoints.py                                       # 210 MB in the current directory, half a minute
    python benchmarks/checkpoints.py --megabytes 2100 --directory /dev/shm --json checkpoints.json

Saves a state of so many megabytes with `torch.save` and with every manager, several times in turn so that a change of the machine's speed
hits all alike, and prints medians. Also: one copy of the state in memory, which a save in the background needs before training may
go on; the same bytes written by `cp` and `dd` and brought to the disk, which a save that survives a power cut needs. Targets: a save in the
background stops the loop for at most 25 % of a bare `torch.save` and checkpoints are verified at 500 MB/s or more; exits with 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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

ROUNDS = 5
TENSOR = 2**20
"""Values of a tensor of the state, in float32."""


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
            found[name] = kind(
                place, domain=LocalDomain(), run_id="run", settings=settings, step_mode=True
            )
    return found


def run(*commands: Sequence[str | Path]) -> None:
    """Run commands that copy a file."""
    for command in commands:
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def measure(directory: Path, tensors: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds by what was done, and the megabytes that a save in the background added to the process."""
    state = {str(index): torch.randn(TENSOR) for index in range(tensors)}
    payload = {"format_version": 1, "model": state}
    managers = open_managers(directory)
    before = resident()
    managers["file async"].save_checkpoint(payload, epoch=0, global_step=0)
    managers["file async"].wait()
    added = resident() - before
    bare, copy = directory / "bare.pth", directory / "copy.pth"
    held = {name: tensor.clone() for name, tensor in state.items()}
    plain: dict[str, Callable[[], object]] = {
        "memory copy": lambda: [held[name].copy_(tensor) for name, tensor in state.items()],
        "torch.save": lambda: torch.save(payload, bare),
        "cp, sync": lambda: run(["cp", bare, copy], ["sync", copy]),
        "dd fsync": lambda: run(["dd", f"if={bare}", f"of={copy}", "bs=4M", "conv=fsync"]),
    }
    times: dict[str, list[float]] = {}
    # The first round makes the memory for copies, which later saves use again.
    for step in range(1, ROUNDS + 2):
        for name, action in plain.items():
            times.setdefault(name, []).append(seconds(action))
        for name, manager in managers.items():
            stall = seconds(
                lambda m=manager, s=step: m.save_checkpoint(  # type: ignore[misc]
                    payload, epoch=0, global_step=s
                )
            )
            times.setdefault(name, []).append(stall)
            manager.wait()
        for name in ("file sync", "dcp sync"):
            store = managers[name].store
            path = store.path("latest")
            times.setdefault(f"verify {name[:-5]}", []).append(
                seconds(lambda s=store, p=path: s.verify(p, "full"))  # type: ignore[misc]
            )
    for manager in managers.values():
        manager.close()
    return {name: values[1:] for name, values in times.items()}, added


def show(medians: dict[str, float], megabytes: float) -> None:
    """Print the figures: a speed where bytes are read or written, and the shares that a stop of the loop is."""
    for name, value in medians.items():
        line = f"{name:12s} {value * 1e3:8.1f} ms {megabytes / value:7.0f} MB/s"
        if name.endswith("async"):
            kind = name.partition(" ")[0]
            line += f"  {value / medians[f'{kind} sync']:6.1%} of {kind} sync, x {value / medians['memory copy']:.2f} of the memory copy"
        print(line)


def main() -> int:
    """Print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=210, help="size of the state")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to save")
    parser.add_argument("--json", type=Path, help="write the figures there")
    asked = parser.parse_args()
    tensors = max(1, round(asked.megabytes * 1e6 / (4 * TENSOR)))
    megabytes = tensors * 4 * TENSOR / 1e6
    with tempfile.TemporaryDirectory(dir=asked.directory) as directory:
        times, added = measure(Path(directory).absolute(), tensors)
    medians = {name: statistics.median(values) for name, values in times.items()}
    show(medians, megabytes)
    print(f"{'memory':12s} {added:7.1f} MB added by a save of {megabytes:.0f} MB in the background")
    if asked.json:
        asked.json.write_text(
            json.dumps({"seconds": medians, "megabytes": megabytes, "megabytes_added": added})
        )
    slow = [
        name for name in ("file async", "dcp async") if medians[name] > 0.25 * medians["torch.save"]
    ]
    slow += [
        name for name in medians if name.startswith("verify") and megabytes / medians[name] < 500
    ]
    print(f"missed: {', '.join(slow)}" if slow else "all targets met")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
