"""A search over settings with Ray Tune: trials that fall behind are stopped early, and a search that was killed goes on where it was.

    python examples/sweeps/tune.py                          # 12 trials, two at a time
    python examples/sweeps/tune.py --trials 12              # a second start goes on with a search that is not finished

Ray runs each trial in its own process. A trial is a run with `auto_resume`, in the directory that its settings name; one that is
started again goes on from its newest checkpoint, and its earlier scores are reported again.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray
from digits_runner import Digits
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import danling as dl


class Trial(Digits):
    """Reports every evaluation to Ray Tune, which ends the training there when it gives the trial up."""

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        result = super().evaluate_epoch(split)
        self.report(len(self.scores) + 1, result["acc"])
        return result

    def report(self, epoch: int, score: float) -> None:
        """Tell Ray Tune of a score."""
        tune.report({"epoch": epoch, "acc": score})


def train(settings: dict[str, Any]) -> None:
    """Train with the settings of a trial, in a worker of Ray."""
    config = dl.RunnerConfig(
        seed=1, epochs=settings["epochs"], score_name="acc", lineage="trials", auto_resume=True
    )
    config.workspace_root, config.dataloader.batch_size = settings["root"], 32
    config.optim = {"type": "adamw", "lr": settings["lr"]}
    config.model = {"width": settings["width"]}
    with Trial(config) as runner:
        for (
            epoch,
            score,
        ) in runner.scores.items():  # of the attempt before, which the scheduler has to know
            runner.report(epoch, score)
        runner.train()


def search(root: Path, trials: int, epochs: int, at_once: int) -> tune.ResultGrid:
    """Return the results of the search in a directory, begun or gone on with."""
    place = root / "tune"
    if tune.Tuner.can_restore(str(place)):
        return tune.Tuner.restore(
            str(place), train, resume_unfinished=True, resume_errored=True
        ).fit()
    space = {"lr": tune.loguniform(1e-4, 1e-1), "width": tune.choice([16, 32, 64, 128, 256])}
    how = tune.TuneConfig(
        metric="acc",
        mode="max",
        num_samples=trials,
        max_concurrent_trials=at_once,
        scheduler=ASHAScheduler(time_attr="epoch", max_t=epochs, grace_period=2),
    )
    where = tune.RunConfig(name=place.name, storage_path=str(root), verbose=0)
    fixed = {"root": str(root / "runs"), "epochs": epochs}
    return tune.Tuner(
        train, param_space={**space, **fixed}, tune_config=how, run_config=where
    ).fit()


def main() -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--root", type=Path, default=Path("search"))
    options = parser.parse_args()
    # Workers can import the modules next to this program, and whatever else this process can.
    paths = os.pathsep.join(
        [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
    ray.init(
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
        log_to_driver=False,
    )
    results = search(options.root.resolve(), options.trials, options.epochs, options.at_once)
    ends = [metrics for place in range(len(results)) if (metrics := results[place].metrics)]
    best = max(ends, key=lambda end: end["acc"])
    stopped = sum(end["epoch"] < options.epochs for end in ends)
    found = {name: best["config"][name] for name in ("lr", "width")}
    print(
        f"best val accuracy {best['acc']:.3f} with {found}; {stopped} of {len(results)} trials were stopped early"
    )


if __name__ == "__main__":
    main()
