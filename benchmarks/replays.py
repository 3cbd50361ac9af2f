"""What computing the gradient of an update again costs: the time of a checked update against another one, and its share at an interval.

    python benchmarks/replays.py                          # GPT-2 (124 M) on a GPU; 1 block of it on the CPU
    python benchmarks/replays.py --layers 12 --samples 8 --interval 100

Prints one JSON object: medians of the seconds of updates, and what checking one in `--interval` of them adds, in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from digests import WORDS, Gpt
from torch import Tensor, nn

import danling as dl


class Timed(dl.Runner):
    """Trains a model of digests.py, and notes when each update has ended.

    Args:
        config: The configuration.
        options: Layers, length of a sequence and samples of an update.
    """

    def __init__(self, config: dict[str, Any], options: argparse.Namespace) -> None:
        super().__init__(config)
        self.model = Gpt(options.layers)
        self.datasets = {
            "train": torch.randint(WORDS, (options.samples * options.updates, options.sequence))
        }
        self.ended: list[float] = []

    def train_step(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Predict the tokens themselves, which costs what predicting the next ones does."""
        pred = self.model(data)
        loss = nn.functional.cross_entropy(pred.flatten(0, 1), data.flatten())
        self.backward(loss)
        return pred, loss

    def step(self) -> Any:
        """Note the time."""
        outcome = super().step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ended.append(time.perf_counter())
        return outcome


def main() -> None:
    """Measure and print."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 1)
    parser.add_argument("--sequence", type=int, default=1024 if on_gpu else 32)
    parser.add_argument("--samples", type=int, default=32 if on_gpu else 1, help="of an update")
    parser.add_argument("--updates", type=int, default=13 if on_gpu else 7)
    parser.add_argument("--replays", type=int, default=1)
    parser.add_argument("--interval", type=int, default=100)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    every = 3
    with tempfile.TemporaryDirectory() as directory:
        config = {
            "dir": directory,
            "seed": 1,
            "steps": options.updates,
            "deterministic": True,
            "audit.replay_interval": every,
            "audit.replays": options.replays,
            "checkpoint.load_only": True,
            "optim": {"type": "adamw", "lr": 1e-4},
            "dataloader": {"batch_size": options.samples},
            "precision": "bf16" if on_gpu else None,
        }
        with Timed(config, options) as runner:
            runner.train()
            ended = runner.ended
    taken = {number: ended[number - 1] - ended[number - 2] for number in range(3, len(ended) + 1)}
    checked = statistics.median(seconds for number, seconds in taken.items() if number % every == 0)
    plain = statistics.median(seconds for number, seconds in taken.items() if number % every)
    shown = {
        "device": torch.cuda.get_device_name()
        if on_gpu
        else f"cpu, {torch.get_num_threads()} threads",
        "tokens": options.samples * options.sequence,
        "update_seconds": round(plain, 4),
        "checked_seconds": round(checked, 4),
        "replays": options.replays,
        "interval": options.interval,
        "percent": round(100 * (checked - plain) / (options.interval * plain), 3),
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
