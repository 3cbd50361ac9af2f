"""Finetuning with frozen layers and parameter groups: learn ten digits, then to tell even from odd from forty images.

python examples/finetune.py                               # 7 s of processor time
python examples/finetune.py --epochs 40 --optim.lr 1e-3 --workspace_root elsewhere      # any key, for all three runs

The first run learns all ten digits. The second one takes over its weights but the head, freezes the first layer, trains the second one at
a tenth of the rate of the head, and keeps weight decay off the biases. It prints 0.911 test accuracy, and 0.825 for the same network from
scratch on the same forty images.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Network(nn.Module):
    """Two layers and a head over flat 8 x 8 images."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores (B, classes) of images (B, 64)."""
        scores: Tensor = self.head(self.second(self.first(images).relu()).relu())
        return scores


class DigitsRunner(dl.Runner):
    """Learns the digit of an image, or its remainder by `config.task.classes`."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        task = self.config.task
        images, labels = images.float() / 16, labels % task.classes
        # The images of the first run come after those of the others, and the test images are not trained on.
        chosen = slice(100, 1300) if task.classes == 10 else slice(0, 40)
        self.datasets = {
            "train": TensorDataset(images[chosen], labels[chosen]),
            "test": TensorDataset(images[1300:], labels[1300:]),
        }
        self.model = Network(task.classes)
        # What is frozen here is left out of the optimizer.
        self.model.first.requires_grad_(not task.fixed)
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


def settings() -> dl.RunnerConfig:
    """Return what the three runs have in common; the command line goes above it."""
    config = dl.RunnerConfig(seed=1, epochs=20, score_name="acc")
    config.dataloader = {"batch_size": 10}
    config.optim = {"type": "adamw", "lr": 3e-3, "weight_decay": 0.05}
    config.optim.param_groups = [
        {"pattern": r"\.bias$", "weight_decay_multiplier": 0.0},
        {"pattern": r"^second\.", "lr_multiplier": 0.1},
    ]
    config.parse()
    return config


def of_run(
    common: dl.RunnerConfig, lineage: str, *, classes: int, epochs: int, fixed: bool = False
) -> dl.RunnerConfig:
    """Return the configuration of one of the runs."""
    config: dl.RunnerConfig = common.copy()
    config.lineage, config.epochs = lineage, epochs
    config.task = {"classes": classes, "fixed": fixed}
    return config


if __name__ == "__main__":
    config = settings()
    epochs = config.epochs or 0
    with DigitsRunner(of_run(config, "pretrain", classes=10, epochs=max(epochs // 4, 1))) as runner:
        runner.train()
        source = runner.workspace.checkpoints / "best.pth"

    finetune = of_run(config, "finetune", classes=2, epochs=epochs, fixed=True)
    finetune.checkpoint.exclude_from_loading = ["model.head"]
    with DigitsRunner.from_pretrained(finetune, source) as runner:
        before = runner.model.first.weight.clone()
        runner.train()
        assert torch.equal(runner.model.first.weight, before)
        runner.print(f"finetuned: test accuracy {runner.evaluate('test')['test']['acc']:.3f}")

    with DigitsRunner(of_run(config, "scratch", classes=2, epochs=epochs)) as runner:
        runner.train()
        runner.print(f"from scratch: test accuracy {runner.evaluate('test')['test']['acc']:.3f}")
