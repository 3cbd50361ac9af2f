"""Settings composed by Hydra: groups of files, overrides on the command line, and one run for each combination with --multirun.

    python examples/sweeps/composed.py                                            # val accuracy 0.969
    python examples/sweeps/composed.py optim=sgd epochs=5
    python examples/sweeps/composed.py --multirun optim=adamw,sgd model.width=32,64

The run is where the library puts it (`workspace_root`, and an id made of the settings), so the same command with `auto_resume=true`
goes on. Hydra keeps its own notes under `outputs` and `multirun`.
"""

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import danling as dl


class Digits(dl.Runner):
    """A small network on handwritten digits."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        digits = TensorDataset(images.float() / 16, labels)
        parts = random_split(digits, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
        self.datasets = dict(zip(("train", "val"), parts))
        width = int(config.model.width)
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


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
