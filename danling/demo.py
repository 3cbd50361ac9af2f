"""What the library promises, in about 80 seconds: `python -m danling.demo` trains a network, kills it ten times, and compares the bits.

Two processes train the same small network on the CPU, with augmentation, dropout, AdamW, a schedule and averaged weights. One is left
alone. The other one is killed by SIGKILL, at instants drawn at random, and started again, until ten kills have met it. At the end the
SHA-256 of weights, optimizer and averages, and every logged loss, are compared.

    python -m danling.demo --kills 20 --seed 7 --dir runs/demo
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

UPDATES_BETWEEN_KILLS = (15, 40)
"""The fewest and the most updates that a process makes before it is killed, counted from where it continued."""


# The program that is killed


def train(arguments: Sequence[str]) -> int:
    """Train the network, from its newest checkpoint if there is one; print the number of each update, and a hash at the end."""
    import torch
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    import danling as dl

    class Spirals(Dataset[tuple[Tensor, Tensor]]):
        """Points of three spirals, moved a little each time they are read."""

        def __init__(self, length: int) -> None:
            angles = torch.linspace(0.2, 3.0, length)
            self.targets = torch.arange(length) % 3
            turned = 4 * angles + self.targets * (2 * torch.pi / 3)
            self.points = angles[:, None] * torch.stack((turned.cos(), turned.sin()), dim=1)

        def __len__(self) -> int:
            return len(self.points)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.points[index] + 0.05 * torch.randn(2), self.targets[index]

    class Demo(dl.TorchRunner):
        def __init__(self, config: dl.RunnerConfig) -> None:
            super().__init__(config)
            hidden = (
                nn.Linear(2, 128),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(128, 128),
                nn.ReLU(),
                nn.Dropout(0.1),
            )
            self.model = nn.Sequential(*hidden, nn.Linear(128, 3))
            self.criterion = nn.CrossEntropyLoss()
            self.metrics = {"acc": dl.metrics.accuracy}
            self.datasets = {"train": Spirals(1536), "val": Spirals(300)}

        def step(self) -> Any:
            outcome = super().step()
            print(self.state.train.global_step, flush=True)
            return outcome

    config = dl.RunnerConfig(
        seed=1, auto_resume=True, log_interval=1, score_name="acc", evaluate_interval=100
    )
    config.merge(
        {"dataloader": {"batch_size": 32}, "checkpoint": {"interval": 5, "keep_latest_k": 2}}
    )
    config.merge(
        {
            "optim": {"type": "adamw", "lr": 1e-2},
            "scheduler": {"type": "cosine", "warmup_steps": 0.1},
        }
    )
    config.merge({"ema": {"enabled": True, "decay": 0.98}})
    config.parse(list(arguments))
    with Demo(config) as runner:
        runner.train()
        found = hashlib.sha256()
        for part in (
            runner.model.state_dict(),
            runner.optimizer.state_dict()["state"],
            runner.ema.weights,
        ):
            for tensor in tensors_in(part):
                found.update(tensor.numpy().tobytes())
        print(f"{runner.best_score:.3f} {found.hexdigest()}", flush=True)
    return 0


def tensors_in(value: object) -> list[Any]:
    """Return the tensors in nested dictionaries."""
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    return [value.detach()] if hasattr(value, "detach") else []


# The program that kills it


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, once with kills, and compare; return 1 if anything differs."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["train"]:
        return train(words[1:])
    parser = argparse.ArgumentParser(
        prog="python -m danling.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the instants of the kills")
    parser.add_argument("--dir", type=Path, help="keep both runs here; otherwise they are removed")
    options = parser.parse_args(words)
    if options.kills < 1:
        parser.error(f"Expected at least one kill. Received: --kills {options.kills}.")
    if options.dir is not None and options.dir.exists():
        parser.error(
            f"Expected a directory that does not exist yet. Received: --dir {options.dir}."
        )
    with tempfile.TemporaryDirectory(prefix="danling-demo-") as temporary:
        directory = options.dir or Path(temporary)
        is_same = compare(directory, kills=options.kills, seed=options.seed)
    return 0 if is_same else 1


def compare(directory: Path, *, kills: int, seed: int) -> bool:
    """Make both runs below a directory, and return whether they are the same."""
    draw = random.Random(seed)
    begun = time.monotonic()
    updates = UPDATES_BETWEEN_KILLS[1] * (kills + 1)
    print(
        f"Two runs of {updates} updates, at once. One is left alone, the other is killed {kills} times:",
        flush=True,
    )
    directory.mkdir(parents=True, exist_ok=True)
    alone, killed = directory / "alone", directory / "killed"
    undisturbed = start(alone, updates)
    try:
        done = 0
        for number in range(1, kills + 1):
            instant = done + draw.randint(*UPDATES_BETWEEN_KILLS), draw.uniform(0, 0.02)
            done = kill(start(killed, updates), *instant)
            print(
                f"{time.monotonic() - begun:5.1f} s  kill {number:2d}: SIGKILL after update {done}",
                flush=True,
            )
        ends = [finish(start(killed, updates)), finish(undisturbed)]
    finally:
        undisturbed.kill()  # does nothing to one that has ended
    losses = [loss_of(run) for run in (alone, killed)]
    print("\n                 accuracy, SHA-256 of weights, optimizer and averages")
    print(f"left alone       {ends[1]}\nkilled {kills:2d} times  {ends[0]}\n")
    is_same = ends[0] == ends[1] and losses[0] == losses[1] and len(losses[0]) == updates
    verdict = "the same, bit for bit" if is_same else "DIFFERENT: please report this"
    what = f"Weights, optimizer, averages and {len(losses[1])} logged losses"
    print(f"{what} are {verdict} ({time.monotonic() - begun:.0f} s).")
    return is_same


def start(directory: Path, updates: int) -> subprocess.Popen[str]:
    """Start the program in another process, on one thread, so that its numbers do not depend on the number of cores."""
    command = [
        sys.executable,
        "-m",
        "danling.demo",
        "train",
        "--dir",
        str(directory),
        "--steps",
        str(updates),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = directory.with_suffix(".log").open("a")
    with log:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )


def kill(program: subprocess.Popen[str], update: int, wait: float) -> int:
    """Kill a program a moment after an update, and return the last update that it has made."""
    done = 0
    for line in lines_of(program):
        done = int(line)
        if done >= update:
            break
    time.sleep(wait)
    program.send_signal(signal.SIGKILL)
    done = [done, *map(int, program.communicate()[0].split())][-1]
    if program.returncode != -signal.SIGKILL:
        raise RuntimeError(
            f"Expected the program to run until it is killed. Received: exit code {program.returncode}."
        )
    return done


def finish(program: subprocess.Popen[str]) -> str:
    """Let a program end, and return its last line."""
    last = ""
    for line in lines_of(program):
        last = line.strip()
    if program.wait() != 0:
        raise RuntimeError(
            f"Expected the program to end. Received: exit code {program.returncode}."
        )
    return last


def lines_of(program: subprocess.Popen[str]) -> IO[str]:
    """Return what a program prints."""
    assert program.stdout is not None
    return program.stdout


def loss_of(run: Path) -> dict[int, float]:
    """Return the logged loss of each update."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["train/loss"] for record in records if "train/loss" in record}


if __name__ == "__main__":
    sys.exit(main())
