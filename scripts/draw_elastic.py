"""Draw docs/assets/elastic.svg from a real run: `PYTHONPATH=. python scripts/draw_elastic.py` (two minutes; torch 2.14 or newer).

`danling run` trains a small network on four ranks. The script ends two of them by SIGKILL, waits until their replacements train, ends the
main process, and waits again. Another process trains the same alone. The script ends with an error unless both end in one SHA-256 of the
weights with the same losses, each update is logged once, and all that were killed were replaced; then it draws the ranks and the losses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEPS = 4, 600
KILLS = [[1, 3], [0]]
"""Ranks that are killed at once, round by round; the next round begins when all ranks train again."""
LIMIT = 900.0
"""Seconds until the script gives up."""


class Points(dl.Runner):
    """A small network on points. It notes which process has which rank."""

    not_saved = ("pause", "notes")

    def __init__(self, config: dict[str, Any], pause: float, notes: Path) -> None:
        super().__init__(config)
        self.pause, self.notes = pause, notes
        points = torch.randn(3000, 32, generator=torch.Generator().manual_seed(0))
        self.datasets = {"train": TensorDataset(points, points[:, :10].argmax(1))}
        self.model = nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 10)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.note()

    def membership_changed(self, before: int, after: int) -> None:
        self.note()

    def note(self) -> None:
        """Note the rank of this process, which changes when others end."""
        with self.notes.open("a") as file:
            file.write(
                json.dumps({"pid": os.getpid(), "rank": self.rank, "size": self.world_size}) + "\n"
            )

    def train_step(self, data: Any) -> Any:
        time.sleep(self.pause)  # as a larger model would take
        return super().train_step(data)


def train(directory: Path, *, is_elastic: bool) -> None:
    """Train in this process, one of several or alone, and write the hash of the weights."""
    torch.set_num_threads(1)
    settings = {
        "dir": str(directory / "run"),
        "seed": 1,
        "steps": STEPS,
        "log_interval": 1,
        "gradient_sum": "canonical",
        "max_grad_norm": 1.0,
        "ema": {"enabled": True},
        "optim": {"type": "adamw", "lr": 3e-3},
        "scheduler": {"type": "cosine"},
        "dataloader": {"global_batch_size": 64, "micro_batch_size": 8},
        "elastic": {"enabled": is_elastic},
    }
    with Points(settings, 0.02 if is_elastic else 0.0, directory / "notes") as runner:
        runner.train()
        if runner.is_main_process:
            weights = b"".join(
                p.detach().numpy().tobytes() for p in runner.unwrapped_model.parameters()
            )
            Path(directory, "hash.txt").write_text(hashlib.sha256(weights).hexdigest())


def run(directory: Path) -> list[tuple[int, int]]:
    """Train with ranks that are killed; return after which update how many were."""
    words = ["-m", "danling", "run", "--ranks", str(RANKS), "--spares", "2", "--"]
    command = [sys.executable, *words, sys.executable, __file__, "--rank", str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(command, env=environment)
    end, killed, dead = time.monotonic() + LIMIT, [], set[int]()
    try:
        for ranks in KILLS:
            pids = all_train(directory, end, job, dead)
            for rank in ranks:
                os.kill(pids[rank], signal.SIGKILL)
                dead.add(pids[rank])
            killed.append((records(directory)[-1]["step"], len(ranks)))
        all_train(directory, end, job, dead)
        job.wait(end - time.monotonic())
    finally:
        job.terminate()
        job.wait()
    if job.returncode != 0:
        raise SystemExit(f"Expected the job to end with 0. Received: {job.returncode}.")
    return killed


def all_train(
    directory: Path, end: float, job: subprocess.Popen[bytes], dead: set[int]
) -> dict[int, int]:
    """Wait until all ranks train, and have for a while; return the process of each rank."""
    whole: dict[int, int] = {}
    while time.monotonic() < end and job.poll() is None:
        time.sleep(0.05)
        file = directory / "notes"
        notes = (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )
        newest = {note["pid"]: note for note in notes}
        whole = {
            note["rank"]: pid
            for pid, note in newest.items()
            if note["size"] == RANKS and pid not in dead
        }
        started = records(directory)
        if len(whole) == RANKS and started and started[-1]["step"] >= 10:
            mark = started[-1]["step"]
            while time.monotonic() < end and records(directory)[-1]["step"] < mark + 40:
                time.sleep(0.05)
            return whole
    raise SystemExit(f"Expected {RANKS} ranks to train within {LIMIT:g} s. Received: {len(whole)}.")


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics so far."""
    file = directory / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(directory: Path) -> list[tuple[int, float]]:
    """Return the loss of each update."""
    return [
        (record["step"], record["train/loss"])
        for record in records(directory)
        if "train/loss" in record
    ]


def main() -> int:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "assets" / "elastic.svg")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank, is_elastic=True)
        return 0
    with tempfile.TemporaryDirectory() as name:
        disturbed, alone = Path(name, "disturbed"), Path(name, "alone")
        for directory in (disturbed, alone):
            directory.mkdir()
        killed = run(disturbed)
        train(alone, is_elastic=False)
        hashes = {each.name: (each / "hash.txt").read_text() for each in (disturbed, alone)}
        print(hashes, killed, flush=True)
        if len(set(hashes.values())) > 1 or losses(disturbed) != losses(alone):
            raise SystemExit("Expected one hash and the same losses, each once, of both runs.")
        changes = [record for record in records(disturbed) if "elastic/ranks" in record]
        draw(changes, killed, losses(disturbed), losses(alone), hashes["alone"], options.output)
    print(options.output)
    return 0


def draw(
    changes: list[dict[str, Any]],
    killed: list[tuple[int, int]],
    ours: list[tuple[int, float]],
    theirs: list[tuple[int, float]],
    digest: str,
    output: Path,
) -> None:
    """Draw the number of ranks, and the losses of both runs."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "elastic",
        "svg.fonttype": "none",
    }  # text as text: a tenth of the file
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(10.5, 4.6), sharex=True, height_ratios=(1, 1.5)
    )
    steps, ranks = [0], [RANKS]
    for change in changes:
        steps += [change["step"], change["step"]]
        ranks += [ranks[-1], int(change["elastic/ranks"])]
        gap = f"{1000 * change['elastic/gap_seconds']:.0f} ms"
        above.annotate(
            gap, (change["step"], ranks[-1]), (4, 5), textcoords="offset points", fontsize=8
        )
    above.plot([*steps, STEPS], [*ranks, ranks[-1]], color="#1565c0", linewidth=1.6)
    lower = [
        change
        for change, before in zip(changes, [RANKS, *(each["elastic/ranks"] for each in changes)])
        if change["elastic/ranks"] < before
    ]
    above.plot(
        [each["step"] for each in lower],
        [each["elastic/ranks"] for each in lower],
        "x",
        color="#b71c1c",
        label="SIGKILL",
    )
    above.set(ylabel="ranks", ylim=(0, RANKS + 1), yticks=range(RANKS + 1))
    above.legend(frameon=False, loc="lower right")
    below.plot(*zip(*theirs), color="#9e9e9e", linewidth=3.2, label="one process, undisturbed")
    below.plot(
        *zip(*ours),
        color="#1565c0",
        linewidth=0.9,
        label=f"ranks that are killed and replaced ({sum(n for _, n in killed)} kills)",
    )
    below.set(xlabel="update", ylabel="training loss", xlim=(0, STEPS))
    below.legend(frameon=False, loc="upper right")
    below.set_title(
        f"SHA-256 of the weights of both: {digest}", family="monospace", fontsize=8, loc="left"
    )
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
