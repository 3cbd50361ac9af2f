"""Training on workers of Ray Train: it starts the processes and their group, reports metrics, and starts them again when one dies.

    python examples/sweeps/workers.py                       # two workers on this machine
    python examples/sweeps/workers.py --workers 8 --gpu     # on a cluster, with a directory that all of its machines see as --dir

A runner finds the process group and the environment that Ray Train has made. When a worker dies, all of them are started again, and
`auto_resume` goes on from the newest checkpoint: bitwise as if nothing had happened.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import ray
import ray.train
from digits_runner import Digits
from ray.train.torch import TorchTrainer

import danling as dl


class Reporting(Digits):
    """Reports every evaluation to Ray Train, on all ranks as it asks for."""

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        result = super().evaluate_epoch(split)
        ray.train.report({"epoch": len(self.scores) + 1, **result})
        return result


def train(settings: dict[str, Any]) -> None:
    """Train in a worker."""
    with Reporting(dl.RunnerConfig(settings)) as runner:
        runner.train()


def main() -> None:
    """Start the workers, and print how it ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("run"))
    options = parser.parse_args()
    settings = {
        "seed": 1,
        "epochs": options.epochs,
        "score_name": "acc",
        "dir": str(options.dir.resolve()),
        "auto_resume": True,
        "dataloader": {"global_batch_size": 32},
        "optim": {"type": "adamw", "lr": 1e-2},
        "model": {"width": 64},
    }
    # Workers can import the modules next to this program, and whatever else this process can.
    paths = os.pathsep.join(
        [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": paths}})
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=ray.train.RunConfig(
            name=options.dir.name + "-ray",
            storage_path=str(options.dir.resolve().parent),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    trainer.fit()
    best = json.loads((options.dir / "best.json").read_text())
    print(f"best val accuracy {best['score']:.3f} in {options.dir}")


if __name__ == "__main__":
    main()
