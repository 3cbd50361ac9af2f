"""What telemetry and logging cost at the default interval, beside updates of about one millisecond.

    OMP_NUM_THREADS=1 python benchmarks/telemetry.py                   # about a minute
    OMP_NUM_THREADS=1 python benchmarks/telemetry.py --rounds 10 --json telemetry.json

Two runners train the same model on the same batches: one with the log file, the JSONL file and lines at the default
interval of a run of 2000 steps (every 20), the other without a log line. Blocks of updates are
interleaved; each round of the first is divided by the round of the second beside it. Medians and quartiles over the rounds, of
processor time, so that other programs of the machine count as little as they can.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import danling as dl

BLOCK = 500
DEFAULT_INTERVAL = 20


class Benchmarked(dl.TorchRunner):
    """An MLP whose update takes about a millisecond on one core.

    Args:
        width: Hidden units.
        config: Settings.
    """

    def __init__(self, width: int, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(100, 32, 64, generator=generator)
        targets = torch.randint(10, (100, 32), generator=generator)
        self.dataloaders = {"train": list(zip(inputs, targets))}


def make_runner(root: str, width: int, *, telemetry: bool, tensorboard: bool = False) -> Benchmarked:
    """Return a runner that never evaluates or saves."""
    config = {
        "seed": 0,
        "steps": 0,
        "max_grad_norm": 1.0,
        "optim": {"type": "adamw", "lr": 1e-3},
        "log": telemetry,
        "tensorboard": tensorboard,
        "log_interval": DEFAULT_INTERVAL if telemetry else 10**9,
        "evaluate_interval": 10**9,
        "workspace_root": f"{root}/{telemetry}",
        "checkpoint": {"load_only": True},
    }
    return Benchmarked(width, config)


def measure_block(runner: Benchmarked) -> float:
    """Return microseconds of processor time an update over one block, those of the writers' threads included."""
    runner.config.steps = (runner.config.steps or 0) + BLOCK
    begin = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):
        runner.train_steps()
    return (time.process_time() - begin) / BLOCK * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds")
    parser.add_argument("--width", type=int, default=160, help="hidden units")
    parser.add_argument("--tensorboard", action="store_true", help="with TensorBoard, which is off by default")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        quiet = make_runner(root, arguments.width, telemetry=False)
        telling = make_runner(root, arguments.width, telemetry=True, tensorboard=arguments.tensorboard)
        pairs = [(measure_block(quiet), measure_block(telling)) for _ in range(arguments.rounds + 1)][1:]
        quiet.close()
        telling.close()
    low, ratio, high = statistics.quantiles([with_ / without for without, with_ in pairs], n=4)
    step = statistics.median(without for without, _ in pairs)
    print(
        f"an update without: {step:.0f} us; with telemetry and logging every {DEFAULT_INTERVAL}: x {ratio:.4f} ({low:.4f}-{high:.4f})"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"step_us": step, "ratio": ratio, "low": low, "high": high}, indent=2))


if __name__ == "__main__":
    main()
