"""Draw docs/assets/any_size.svg from real runs: `PYTHONPATH=. python scripts/draw_any_size.py` (about a minute).

A small network is trained on 1, 2, 3 and 4 processes, and on 2, then 3, then 1, with `gradient_sum: canonical`; and on 1, 2 and 3 with the
usual sums. The script ends with an error unless all of the first kind end in one SHA-256 of the weights with the same losses, and those of
the second kind do not; then it draws the differences of their losses, and the hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from ranks import run_on_ranks  # noqa: E402

RUNS = {
    "canonical": [[1], [2], [3], [4], [2, 3, 1]],
    "fast": [[1], [2], [3]],
}
"""Numbers of processes, one after another, of each run."""


class Points(dl.Runner):
    """A small network on points."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        points = torch.randn(2000, 32, generator=torch.Generator().manual_seed(0))
        self.datasets = {"train": TensorDataset(points, points[:, :10].argmax(1))}
        self.model = nn.Sequential(
            nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10)
        )
        self.criterion = nn.CrossEntropyLoss()


def train(rank: int, directory: str, gradient_sum: str, epochs: int) -> None:
    """Train to so many epochs in this process, one of several, and write losses and the hash of the weights."""
    settings = {
        "dir": directory,
        "auto_resume": True,
        "seed": 1,
        "epochs": epochs,
        "log_interval": 1,
        "gradient_sum": gradient_sum,
        "max_grad_norm": 1.0,
        "optim": {"type": "adamw", "lr": 3e-3},
        "dataloader": {"global_batch_size": 96, "micro_batch_size": 8},
    }
    with Points(settings) as runner:
        runner.train()
        weights = b"".join(
            p.detach().numpy().tobytes() for p in runner.unwrapped_model.parameters()
        )
        if rank == 0:
            Path(directory, "hash.txt").write_text(hashlib.sha256(weights).hexdigest())


def run(directory: Path, gradient_sum: str, sizes: Sequence[int]) -> tuple[str, dict[int, float]]:
    """Train on these numbers of processes in turn; return the hash of the weights and the loss of each update."""
    for number, size in enumerate(sizes, 1):
        run_on_ranks(train, str(directory), gradient_sum, 9 * number // len(sizes), world_size=size)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["train/loss"] for record in records if "train/loss" in record}
    return (directory / "hash.txt").read_text(), losses


def main() -> int:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "assets" / "any_size.svg")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for gradient_sum, runs in RUNS.items():
            for sizes in runs:
                label = f"{gradient_sum}, {', then '.join(map(str, sizes))} process{'' if sizes == [1] else 'es'}"
                found[label] = run(
                    Path(name, label.replace(", ", "-").replace(" ", "-")), gradient_sum, sizes
                )
                print(found[label][0][:16], label, flush=True)
    ours = [result for label, result in found.items() if label.startswith("canonical")]
    others = {result[0] for label, result in found.items() if label.startswith("fast")}
    if any(result != ours[0] for result in ours) or len(others) != len(RUNS["fast"]):
        raise SystemExit(
            "Expected one hash and the same losses of all runs with canonical sums, and others of the rest."
        )
    draw(found, options.output)
    print(options.output)
    return 0


def draw(found: dict[str, tuple[str, dict[int, float]]], output: Path) -> None:
    """Draw the losses against those of one process, and the hashes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "any size",
        "svg.fonttype": "none",
    }  # text as text: a tenth of the file
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 3.6), width_ratios=(1.15, 1))
    for label, (_, losses) in found.items():
        if label.startswith("fast") and not label.startswith("fast, 1 "):
            whole = found["fast, 1 process"][1]
            pairs = [
                (step, abs(losses[step] - loss) / loss)
                for step, loss in whole.items()
                if losses[step] != loss
            ]
            left.semilogy(*zip(*pairs), label=label, linewidth=1)
    left.set(xlabel="update", ylabel="difference of the loss\nfrom that of one process")
    left.plot([], [], color="#2e7d32", label="canonical, any number: 0")
    left.legend(frameon=False, loc="lower right")
    right.axis("off")
    right.text(0, 1.0, "SHA-256 of the weights at the end", weight="bold")
    for row, (label, (digest, _)) in enumerate(found.items(), 1):
        colour = "#2e7d32" if label.startswith("canonical") else "#b71c1c"
        height = 1.0 - 0.115 * row
        right.text(0, height, digest[:16], family="monospace", color=colour)
        right.text(0.48, height, label)
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
