"""A search over settings with Optuna: trials that fall behind are pruned, and a search that was killed goes on where it was.

    python examples/sweeps/search.py                          # 20 trials, about a minute: best val accuracy 0.975, 12 were pruned
    python examples/sweeps/search.py --trials 40              # goes on with the same study, up to 40 trials in all
    optuna-dashboard sqlite:///search/study.db                # the study in a browser (not installed here)

Kill it at any moment and start it again: the trial that was under way is tried again with its settings, and goes on from the newest
checkpoint of its run, which is found by these settings. Several of these programs may work on one study, if none is started while
another one trains: a trial that is not finished is taken for one that was killed.
"""

import argparse
from pathlib import Path

import optuna
from digits_runner import Digits
from optuna.trial import TrialState

import danling as dl


class Trial(Digits):
    """Stops where Optuna gives it up."""

    def __init__(self, config: dl.RunnerConfig, trial: optuna.Trial) -> None:
        super().__init__(config)
        self.trial, self.pruned = trial, False

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        result = super().evaluate_epoch(split)
        self.report(len(self.scores) + 1, result["acc"])
        if self.trial.should_prune():
            self.pruned = True
            self.stop()
        return result

    def report(self, epoch: int, score: float) -> None:
        """Tell Optuna of a score."""
        self.trial.report(score, epoch)


def objective(trial: optuna.Trial, root: Path, epochs: int) -> float:
    """Train with the settings of a trial and return its best score."""
    config = dl.RunnerConfig(
        seed=1, epochs=epochs, score_name="acc", workspace_root=str(root), lineage="trials"
    )
    config.auto_resume, config.log, config.dataloader.batch_size = True, False, 32
    config.optim = {"type": "adamw", "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}
    config.model = {"width": trial.suggest_int("width", 16, 256, log=True)}
    with Trial(config, trial) as runner:
        for (
            epoch,
            score,
        ) in runner.scores.items():  # of the attempt before, which the pruner has to know
            runner.report(epoch, score)
        runner.train()
        if runner.pruned:
            raise optuna.TrialPruned
        assert runner.best_score is not None
        return runner.best_score


def main() -> None:
    """Go on with the study until it has so many trials."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--root", type=Path, default=Path("search"))
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{options.root / 'study.db'}",
        study_name="digits",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
        load_if_exists=True,
    )
    study.sampler = optuna.samplers.TPESampler(
        seed=len(study.trials)
    )  # its own seed, else this start draws what the last one drew
    for killed in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(killed.number, state=TrialState.FAIL)
        study.enqueue_trial(killed.params)
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    study.optimize(
        lambda trial: objective(trial, options.root, options.epochs), options.trials - len(finished)
    )
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    print(
        f"best val accuracy {study.best_value:.3f} with {study.best_params}; {len(pruned)} trials were pruned"
    )


if __name__ == "__main__":
    main()
