"""What a batch loses and what that loss is averaged over, where the model computes it or the batch comes without a target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from .batches import model_weight
from .label_shift import LabelShift
from .outputs import model_loss, prediction_of
from .weighing import BatchWeights
from .window import Window

logger = logging.getLogger("danling")


class LossHooks(Protocol):
    """What is asked of a run for the loss of a batch. It is looked up anew each time, since a user may override or replace it."""

    @property
    def criterion(self) -> Any:
        """The criterion, or `None`."""

    @property
    def unwrapped_model(self) -> object:
        """The model out of the wrapper of its stack."""

    @property
    def window(self) -> Window:
        """The window of micro-batches."""

    def compute_loss(self, pred: object, target: object) -> Tensor:
        """Return the loss of a prediction."""

    def batch_weight(self, data: object, target: object) -> float | Tensor:
        """Return what the loss of a batch is averaged over."""


class BatchLoss:
    """The loss that a model returns by itself, and which batches have a loss at all.

    Args:
        run: What is asked.
        weights: Remembers whether the batches to train on come with a target.
        glance: Looks for a target in the data to train on, where nobody has seen a batch of it.
        own_loss: Whether `compute_loss` is the user's own.
        own_weight: Whether `batch_weight` is the user's own.
        speaks: Whether this process warns.

    Attributes:
        shift: What is known of the labels that the loss of the model counts.
    """

    def __init__(
        self,
        run: LossHooks,
        *,
        weights: BatchWeights,
        glance: Callable[[], None],
        own_loss: bool = False,
        own_weight: bool = False,
        speaks: bool = True,
    ) -> None:
        self.shift = LabelShift()
        self.own_loss = own_loss
        self._run = run
        self._weights = weights
        self._glance = glance
        self._is_looked_at = not (own_loss or own_weight)
        self._speaks = speaks

    @property
    def undecided(self) -> bool:
        """Whether it is still to be found out which labels the loss of the model counts."""
        return self.shift.is_open and self._run.criterion is None

    def weight(self, data: object, target: object) -> float | Tensor:
        """Return what the loss that the model computes is averaged over.

        Args:
            data: The batch.
            target: Its target, or `None`.
        """
        model = self._run.unwrapped_model
        return model_weight(model, target, data, shifts=self.shift.shifts(model))

    def of_model(self, pred: object, target: object, *, training: bool) -> Tensor:
        """Return the loss that the model put into its prediction; the open micro-batch is weighed anew by what that tells.

        Args:
            pred: What the model returned.
            target: The target of the batch, or `None`.
            training: Whether the batch is a micro-batch of the window.

        Raises:
            ValueError: If there is none.
        """
        found = model_loss(pred)
        if found is None:
            raise ValueError(
                f"Expected a criterion, or a model that returns a loss. Received: criterion=None and a prediction of type "
                f"{type(pred).__name__}. Assign `self.criterion`, or override `compute_loss`."
            )
        if self.undecided and self._observe(pred, found, target) and training:
            window = self._run.window
            # Padding stays without weight.
            if window.count and window.current:
                window.reweigh(self._run.batch_weight(None, target))
        return found

    def of_evaluated(self, pred: object, target: object) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.

        Args:
            pred: What the model returned.
            target: The target of the batch, or `None`.
        """
        criterion = self._run.criterion
        has_loss = self.own_loss or criterion is not None
        if target is None:
            targetless = self._trains_targetless()
            has_loss = self.own_loss if targetless is None else targetless and has_loss
        if has_loss:
            return self._run.compute_loss(pred, target)
        found = model_loss(pred) if criterion is None else None
        if found is not None and self.undecided:
            self._observe(pred, found, target)
        return found

    def _trains_targetless(self) -> bool | None:
        """Whether the batches to train on come without a target, `None` where nobody can tell before the first one."""
        if self._weights.targetless is None:
            self._glance()
        return self._weights.targetless

    def observe_returned(self, returned: Any, target: Any) -> None:
        """Look at what a step of the user's returned, which has not asked for the loss.

        Args:
            returned: What it returned, usually the prediction and the loss.
            target: The target of the batch, or `None`.
        """
        found = model_loss(returned[0]) if isinstance(returned, tuple) and returned else None
        if found is not None and self._is_looked_at and self.undecided:
            self.shift.observe_afterwards(found, prediction_of(returned[0]), target)
            self._complain()

    def agree(self, gather: Callable[[Any], Sequence[Any]]) -> None:
        """Weigh alike on all ranks where a model returns its loss, whatever the first batch of each of them told.

        Args:
            gather: Returns the value of every rank.
        """
        if self._run.criterion is None and self.shift.agree(gather(self.shift.answer)):
            self._complain()

    def _observe(self, pred: object, loss: Tensor, target: object) -> bool:
        """Return whether another weight of the batch follows from the loss that the model gave it."""
        if not self._is_looked_at:
            self.shift.is_open = False
            return False
        changes = self.shift.observe(loss, prediction_of(pred), target)
        self._complain()
        return changes

    def _complain(self) -> None:
        if self.shift.complaint is not None and self._speaks:
            logger.warning("%s", self.shift.complaint)
