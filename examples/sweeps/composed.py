"""Settings composed by Hydra: groups of files, overrides on the command line, and one run for each combination with --multirun.

    python examples/sweeps/composed.py                                            # val accuracy 0.969
    python examples/sweeps/composed.py optim=sgd epochs=5
    python examples/sweeps/composed.py --multirun optim=adamw,sgd model.width=32,64

The run is where the library puts it (`workspace_root`, and an id made of the settings), so the same command with `auto_resume=true`
goes on. Hydra keeps its own notes under `outputs` and `multirun`.
"""

import hydra
from digits_runner import Digits
from omegaconf import DictConfig, OmegaConf

import danling as dl


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(composed: DictConfig) -> float:
    """Train with what Hydra has composed; return the score, for a sweeper that searches by it."""
    settings = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    with Digits(dl.RunnerConfig(settings)) as runner:
        runner.train()
        runner.print(f"val accuracy {runner.best_score:.3f} in {runner.dir}")
        return float(runner.best_score or 0.0)


if __name__ == "__main__":
    main()
