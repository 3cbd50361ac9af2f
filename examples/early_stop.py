"""Averaged weights, a rate that falls on a plateau, and early stopping, all three by configuration alone.

python examples/early_stop.py                             # 5 s of processor time
python examples/early_stop.py --patience 20 --scheduler.factor 0.5

It stops by itself after epoch 26 and takes the weights of epoch 18: 0.916 test accuracy. Evaluation, and so the score, the
plateau and `best.pth`, are those of the averaged weights; training goes on with its own.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl


class NoisyDigitsRunner(dl.Runner):
    """Learns digits of which every fifth training label is wrong, so that training too long does harm."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, val, test = order[:700], order[700:1200], order[1200:]
        noisy = labels.clone()
        noisy[train[::5]] = torch.randint(
            10, (len(train[::5]),), generator=torch.Generator().manual_seed(0)
        )
        images = images.float() / 16
        self.datasets = {
            "train": TensorDataset(images[train], noisy[train]),
            "val": TensorDataset(images[val], labels[val]),
            "test": TensorDataset(images[test], labels[test]),
        }
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}


if __name__ == "__main__":
    config = dl.RunnerConfig(
        seed=1, lineage="early_stop", epochs=200, evaluate_splits=["val"], patience=8
    )
    config.dataloader.batch_size = 32
    config.optim = {"type": "adamw", "lr": 5e-3}
    config.scheduler = {
        "type": "reduce_lr_on_plateau",
        "factor": 0.3,
        "patience": 3,
        "monitor": "val.loss",
    }
    config.ema = {"enabled": True, "decay": 0.98}
    config.checkpoint.keep_latest_k = 2
    config.parse()
    with NoisyDigitsRunner(config) as runner:
        runner.train()
        stopped, rate = runner.train_state.epoch, runner.optimizer.param_groups[0]["lr"]
        runner.print(
            f"stopped after epoch {stopped} at a rate of {rate:.1e}; the best was epoch {runner.best_index}"
        )
        runner.load_checkpoint("best")
        runner.print(
            f"test accuracy of the best averaged weights {runner.evaluate('test')['test']['acc']:.3f}"
        )
