"""Runners whose updates are computed again, and in which a bit flips where a test asks for it."""

from __future__ import annotations

from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn

import danling as dl
from danling.utils.tensors import local_part

from .layouts import LENGTH, VOCABULARY, Sentences
from .toys import NoisyPoints

Flip = tuple[str, int, int]
"""What flips (`gradient`, `weight`, `buffer`, `loss`), the update, and the rank."""


class Checked(dl.Runner):
    """A network with statistics, dropout and a constant buffer."""

    # An update that is computed again must not flip again.
    not_saved = ("_flip",)

    def __init__(self, config: dict[str, Any], flip: Flip | None = None) -> None:
        super().__init__(config)
        self._flip = flip
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )
        self.model.register_buffer("scale", torch.full((3,), 1.5))
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": NoisyPoints(64)}

    def train_step(self, data: Any) -> tuple[Any, Any]:
        kind = self._due("weight", "buffer", "gradient")
        if kind in ("weight", "buffer"):
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            tensor = (
                next(p for p in parameters if local_part(p).numel())
                if kind == "weight"
                else self._scale()
            )
            flip_bit(tensor)
            found = super().train_step(data)
            flip_bit(tensor)
            return found
        found = super().train_step(data)
        if kind == "gradient":
            flip_bit(next(g for _, g in self.reduction.named_gradients() if local_part(g).numel()))
        return found

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return self._struck(super().compute_loss(pred * self._scale(), target))

    def _struck(self, loss: Tensor) -> Tensor:
        if self._due("loss"):
            flip_bit(loss)
        return loss

    def _scale(self) -> Tensor:
        return next(
            buffer for name, buffer in self.unwrapped_model.named_buffers() if name == "scale"
        )

    def _due(self, *kinds: str) -> str:
        if self._flip is None:
            return ""
        kind, step, rank = self._flip
        if kind not in kinds or self.state.train.global_step + 1 != step or self.rank != rank:
            return ""
        self._flip = None
        return kind


class CheckedText(Checked):
    """A language model with dropout, for stacks that divide it over tensor and pipeline ranks."""

    def __init__(self, config: dict[str, Any], flip: Flip | None = None) -> None:
        super().__init__(config, flip)
        depth = int(self.config.parallel.axes.pipeline)
        self.model = GPT(
            VOCABULARY, context=LENGTH, width=16, depth=depth, heads=4, tied=False, dropout=0.1
        )
        self.datasets = {"train": Sentences(64)}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return self._struck(super(Checked, self).compute_loss(pred.flatten(0, 1), target.flatten()))


def flip_bit(tensor: Tensor) -> None:
    """Flip a high bit of the mantissa of the first element of a float32 tensor, behind the back of autograd."""
    local_part(tensor.data).view(torch.int32).view(-1)[0] ^= 1 << 22


def settings(root: Any, **more: Any) -> dict[str, Any]:
    """Return the configuration of a run whose updates are all computed again."""
    own = {
        "seed": 1,
        "steps": 8,
        "dir": str(root),
        "log_interval": 1000,
        "checkpoint.load_only": True,
    }
    loading, optim = {"batch_size": 4}, {"type": "adamw", "lr": 0.01}
    checked = {
        "deterministic": True,
        "audit.replay_interval": 1,
        "accum_steps": 2,
        "max_grad_norm": 1.0,
    }
    return {**own, "optim": optim, "dataloader": loading, **checked, **more}


def state_of(runner: dl.TorchRunner) -> dict[str, Tensor]:
    """Return what this rank has of weights, buffers and moments."""
    moments = {
        f"moment/{name}/{key}": local_part(value).clone()
        for name, parameter in runner.named_parameters()
        for key, value in runner.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    weights = {f"weight/{n}": local_part(p.detach()).clone() for n, p in runner.named_parameters()}
    buffers = {f"buffer/{n}": b.clone() for n, b in runner.unwrapped_model.named_buffers()}
    return {**weights, **buffers, **moments}
