"""What a batch loses and what that loss is averaged over, where the model computes it or the batch comes without a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batches import aligned_labels, model_weight
from .outputs import model_loss
from .targets import shifts_labels
from .weighing import BatchWeights

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner


class BatchLoss:
    """The loss that a model returns by itself, and which batches have a loss at all."""

    def __init__(
        self, runner: TorchRunner, *, weights: BatchWeights, glance: Callable[[], None], own_loss: bool = False
    ) -> None:
        self.own_loss = own_loss
        self._runner = runner
        self._weights = weights
        self._glance = glance

    def weight(self, data: object, target: object) -> float | Tensor:
        """Return what the loss that the model computes is averaged over."""
        runner = self._runner
        told = runner.shifts_labels
        shifts = shifts_labels(runner.unwrapped_model) if told is None else told
        if shifts is None and not self.own_loss and _is_of_positions(target) and aligned_labels(data) is None:
            self._refuse_unknown()
        return model_weight(runner.unwrapped_model, target, data, shifts=bool(shifts))

    def _refuse_unknown(self) -> None:
        """Refuse labels of which it is not known whether they are shifted, where the weight of a micro-batch changes the gradient."""
        runner = self._runner
        ranks = max(runner.placement.data_replicas, runner.placement.metrics.size)
        if runner.mode == "train" and (ranks > 1 or runner.accum_steps > 1 or runner.window.count):
            raise ValueError(
                "Expected to know whether the loss that the model returns compares each position with its own label or with the next one: "
                f"micro-batches are weighed by the labels that count. Received: a {type(runner.unwrapped_model).__name__}, which does not "
                f"say, with accum_steps={runner.accum_steps} on {ranks} ranks. Set `shifts_labels` to True or False on the runner or the "
                "model, or override `batch_weight(data, target)`."
            )

    def of_model(self, pred: object) -> Tensor:
        """Return the loss that the model put into its prediction."""
        found = model_loss(pred)
        if found is None:
            raise ValueError(
                f"Expected a criterion, or a model that returns a loss. Received: criterion=None and a prediction of type "
                f"{type(pred).__name__}. Assign `self.criterion`, or override `compute_loss`."
            )
        return found

    def of_evaluated(self, pred: object, target: object) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.
        """
        criterion = self._runner.criterion
        has_loss = self.own_loss or criterion is not None
        if target is None:
            targetless = self._trains_targetless()
            has_loss = self.own_loss if targetless is None else targetless and has_loss
        if has_loss:
            return self._runner.compute_loss(pred, target)
        return model_loss(pred) if criterion is None else None

    def _trains_targetless(self) -> bool | None:
        """Whether the batches to train on come without a target, `None` before the first one where that cannot be told."""
        if self._weights.targetless is None:
            self._glance()
        return self._weights.targetless


def _is_of_positions(target: object) -> bool:
    """Whether a target holds an integer for each position of each sample, as the labels of a language model do."""
    if not isinstance(target, Tensor) or target.ndim != 2:
        return False
    return not (target.is_floating_point() or target.dtype == torch.bool)
