"""Trainings as jobs of submitit, on this machine or on a SLURM cluster; one that is preempted goes on by itself.

    python examples/sweeps/jobs.py                                        # three jobs on this machine: lr 0.01 has 0.972
    python examples/sweeps/jobs.py --cluster slurm --partition gpu        # the same on a cluster

submitit sends its jobs SIGUSR1 before their time is over or when they are preempted. The runner finishes its update, saves its full
state and ends; then submitit puts the job back into the queue, and `auto_resume` goes on from there. Weights are bitwise those of a job
that was left alone.
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "SUBMITIT_PREEMPT_SIGNAL", "USR1"
)  # which the runner heeds; submitit reads it when it is imported

import submitit
import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

import danling as dl


class Training:
    """What a job runs."""

    def __call__(self, settings: dict[str, Any]) -> float:
        """Train, and return the best score."""
        from sklearn.datasets import load_digits

        # Within the function: a job cannot import the modules next to this program.
        class Digits(dl.Runner):
            def __init__(self, config: dl.RunnerConfig) -> None:
                super().__init__(config)
                images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
                digits = TensorDataset(images.float() / 16, labels)
                parts = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
                self.datasets = dict(zip(("train", "val"), parts))
                self.model = nn.Sequential(
                    nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
                )
                self.criterion = nn.CrossEntropyLoss()
                self.metrics = {"acc": dl.metrics.accuracy}

        if submitit.JobEnvironment().num_tasks > 1:
            submitit.helpers.TorchDistributedEnvironment().export()
        requeue: Any = signal.getsignal(signal.SIGUSR1)  # submitit's, until training begins
        try:
            with Digits(dl.RunnerConfig(settings)) as runner:
                runner.train()
                return float(runner.best_score or 0.0)
        except SystemExit as stopped:
            if stopped.code != 143:
                raise
            requeue(signal.SIGUSR1, None)  # all is saved
            raise

    def checkpoint(self, settings: dict[str, Any]) -> submitit.helpers.DelayedSubmission:
        """Return what the job runs when it begins again: the same, which goes on from its checkpoint."""
        return submitit.helpers.DelayedSubmission(self, settings)


def settings_of(root: Path, lr: float, epochs: int) -> dict[str, Any]:
    """Return the settings of one job; its run directory is found again by them."""
    optim = {"type": "adamw", "lr": lr}
    places = {"workspace_root": str(root.absolute()), "lineage": "jobs", "auto_resume": True}
    return {
        **places,
        "seed": 1,
        "epochs": epochs,
        "score_name": "acc",
        "dataloader": {"batch_size": 32},
        "optim": optim,
    }


def make_executor(
    root: Path, cluster: str | None = "local", partition: str | None = None
) -> submitit.AutoExecutor:
    """Return what starts jobs, with an hour and one process for each."""
    executor = submitit.AutoExecutor(folder=root / "jobs-%j", cluster=cluster)
    executor.update_parameters(timeout_min=60, tasks_per_node=1, cpus_per_task=1)
    if partition is not None:
        executor.update_parameters(slurm_partition=partition)
    return executor


def main() -> None:
    """Start a job for each learning rate and wait for all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", choices=("local", "slurm"), default="local")
    parser.add_argument("--partition")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--root", type=Path, default=Path("jobs"))
    options = parser.parse_args()
    executor = make_executor(options.root, options.cluster, options.partition)
    jobs = {
        lr: executor.submit(Training(), settings_of(options.root, lr, options.epochs))
        for lr in (1e-3, 1e-2, 1e-1)
    }
    for lr, job in jobs.items():
        print(f"lr {lr:g}: best val accuracy {job.result():.3f}")


if __name__ == "__main__":
    main()
