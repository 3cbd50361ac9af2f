"""What telemetry and logging cost at the default interval, with updates of about one millisecond.

    OMP_NUM_THREADS=1 python benchmarks/telemetry.py                   # about a minute
    OMP_NUM_THREADS=1 python benchmarks/telemetry.py --rounds 10 --json telemetry.json

Three runners train the same model on the same batches: one with telemetry, the log file, the JSONL file and lines at the default
interval of a run of 2000 steps (every 20), one with telemetry and without a line, one without either: nothing is timed or counted
there. Blocks of updates are interleaved; each round of the first two is divided by the adjacent round of the last one. Medians and
quartiles over the rounds, of processor time, so that other programs of the machine count as little as they can.
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
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(100, 32, 64, generator=generator)
        targets = torch.randint(10, (100, 32), generator=generator)
        self.dataloaders = {"train": list(zip(inputs, targets))}


class Bare(Benchmarked):
    """The same without telemetry and bar, when `silence` has seen to it."""

    def count_tokens(self, data: Any) -> float:
        """Count none."""
        return 0.0


def silence(runner: Benchmarked) -> None:
    """Take telemetry and bar out of a runner, which offers no setting for it: every run is timed."""
    runner.observers.remove(runner._parts.reporter)
    runner._parts.reporter.begin = lambda *_, **__: None  # type: ignore[method-assign]


def make_runner(
    root: str,
    width: int,
    *,
    lines: bool,
    tensorboard: bool = False,
    kind: type[Benchmarked] = Benchmarked,
) -> Benchmarked:
    """Return a runner that never evaluates or saves."""
    config = {
        "seed": 0,
        "steps": 0,
        "max_grad_norm": 1.0,
        "optim": {"type": "adamw", "lr": 1e-3},
        "log": lines,
        "tensorboard": tensorboard,
        "log_interval": DEFAULT_INTERVAL if lines else 10**9,
        "evaluate_interval": 10**9,
        "workspace_root": f"{root}/{kind.__name__}-{lines}",
        "checkpoint": {"load_only": True},
    }
    return kind(width, config)


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
    parser.add_argument(
        "--tensorboard", action="store_true", help="with TensorBoard, which is off by default"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        bare = make_runner(root, arguments.width, lines=False, kind=Bare)
        silence(bare)
        quiet = make_runner(root, arguments.width, lines=False)
        telling = make_runner(root, arguments.width, lines=True, tensorboard=arguments.tensorboard)
        runners = (bare, quiet, telling)
        rounds = [
            [measure_block(runner) for runner in runners] for _ in range(arguments.rounds + 1)
        ][1:]
        for runner in runners:
            runner.close()
    step = statistics.median(measured[0] for measured in rounds)
    figures: dict[str, float] = {"step_us": step}
    print(f"an update without either: {step:.0f} us")
    for name, place in (("telemetry", 1), (f"telemetry and lines every {DEFAULT_INTERVAL}", 2)):
        low, ratio, high = statistics.quantiles(
            [measured[place] / measured[0] for measured in rounds], n=4
        )
        print(f"with {name}: x {ratio:.4f} ({low:.4f}-{high:.4f})")
        prefix = "telemetry_" if place == 1 else ""
        figures |= {f"{prefix}ratio": ratio, f"{prefix}low": low, f"{prefix}high": high}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
