"""Evaluation and inference: exact figures over the whole set, and training's streams and weights left as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, overload

from torch import Tensor

from danling.config import RunnerConfig
from danling.data import derive_seed, move_to_device
from danling.metrics import Meters
from danling.training import (
    criterion_loss,
    criterion_setting,
    criterion_weight,
    prediction_of,
)
from danling.training.component_checks import check_metrics
from danling.training.evaluator import EvaluationMode
from danling.training.forward import EvaluationForward

from . import assembly
from .base_runner import RESERVED_FIGURES
from .torch_state import TorchState


class TorchEvaluation(TorchState):
    """Evaluation and inference of a torch runner."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._batch_weights = assembly.batch_weights(self)
        self._batch_loss = assembly.batch_loss(self)
        self._evaluator = assembly.evaluator(self)

    def build_forward(self) -> EvaluationForward:
        """Return how a batch is evaluated and predicted; a stack whose ranks hold parts of the model brings its own."""
        return EvaluationForward(
            model=lambda: self.model,
            bare=lambda: self.unwrapped_model,
            context=lambda: self.forward_context(),
            loss=lambda pred, target: self.evaluated_loss(pred, target),
        )

    # What a batch means

    def to_device(self, data: Any) -> Any:
        """Return the batch on the runner's device; copies from pinned memory do not block the host.

        No communication: may be called on one rank.

        Args:
            data: The batch as its loader gives it.
        """
        return data if self.device.type == "cpu" else move_to_device(data, self.device)

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return what the mean-reduced loss of a batch is averaged over; override it where the criterion is your own.

        The default counts the targets that the criterion does not ignore, see `danling.training.criterion_weight`; where the model
        computes the loss itself, the labels that it counts, see `danling.training.model_weight`; else samples. Called on every rank
        for every batch, before its forward.

        Args:
            data: The batch, on the device.
            target: Its target, `None` without one.

        Returns:
            A float, or a 0-dim tensor on the device that need not be waited for.
        """
        if self.criterion is None and not self._batch_loss.own_loss:
            return self._batch_loss.weight(data, target)
        return criterion_weight(self.criterion, target, data)

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        """Return the loss of a prediction: `criterion(pred, target)`, or the `loss` that the model itself returned. Called on all ranks.

        Args:
            pred: What the model returned, any type. Of a mapping or an object with `loss` and `logits` the criterion is handed the logits.
            target: The target of the batch, `None` without one.

        Returns:
            The loss as the criterion reduces it: 0-dim.

        Raises:
            ValueError: If there is neither.
        """
        if self.criterion is not None:
            given = pred if isinstance(pred, Tensor) else prediction_of(pred)
            loss: Tensor = (
                self.criterion(given, target) if target is not None else criterion_loss(self.criterion, given, None)
            )
            return loss
        return self._batch_loss.of_model(pred, target, training=self.mode == "train")

    def evaluated_loss(self, pred: Any, target: Any) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none. Called on all ranks.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.

        Args:
            pred: What the model returned, any type.
            target: The target of the batch, `None` without one.
        """
        return self._batch_loss.of_evaluated(pred, target)

    @property
    def sums_loss(self) -> bool:
        """Whether the criterion sums instead of averaging, so that its gradient is not divided."""
        return bool(criterion_setting(self.criterion, "reduction") == "sum")

    # Evaluation

    def evaluate(self, splits: str | Sequence[str] | None = None) -> dict[str, dict[str, float]]:
        """Evaluate whole splits. Call on all ranks.

        Args:
            splits: One split or several; `None` is `evaluate_splits`.

        Returns:
            Figures by split, the same on all ranks.

        Raises:
            ValueError: If a split is unknown, or there is none.
        """
        names = self._splits.choose(splits, self.evaluate_splits, "evaluate")
        return {split: self.evaluate_epoch(split) for split in names}

    def evaluate_epoch(self, split: str) -> dict[str, float]:
        """Evaluate all of one split. Call on all ranks.

        Args:
            split: The split.

        Returns:
            The mean loss and the metrics over every sample of every rank, each counted once; empty when there is none.
        """
        return self._evaluator.evaluate(split, None)

    def evaluate_steps(self, split: str, steps: int | None = None) -> dict[str, float]:
        """Evaluate the first batches of one split. Call on all ranks.

        Args:
            split: The split.
            steps: Batches of each rank; `None` is a twentieth of the run's steps, at least 1.

        Returns:
            The mean loss and the metrics over the samples of these batches on all ranks.

        Raises:
            ValueError: If `steps` is not at least 1, or the split is unknown.
        """
        if steps is not None and steps < 1:
            raise ValueError(f"Expected steps to be at least 1, or None. Received: steps={steps!r}.")
        return self._evaluator.evaluate(split, steps if steps is not None else max((self.steps or 0) // 20, 1))

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients. Called on all ranks.

        Called alone, it is made as in an evaluation: on the bare model in evaluation mode, with averaged weights where there are any, and
        training's random streams are left as they were.

        Args:
            data: The batch; within an evaluation it is on the device.

        Returns:
            The prediction, and the loss as the criterion reduces it; `None` for a batch that has none.
        """
        return self._evaluator.forward.evaluate(data)

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        """Return the figures of an evaluation; override to add those that are no mean, such as a perplexity.

        Call on all ranks. Each figure is a number, or a tensor of one. `super().summarize(split, totals)` returns means over all
        ranks, from which others follow:
        `result["perplexity"] = math.exp(result["loss"])`.

        Args:
            split: The split that was evaluated.
            totals: Sums and weights of this rank.
        """
        result, metrics = totals.averages(self.placement.metrics), self.metric_set.compute(self.placement.metrics)
        check_metrics(metrics, RESERVED_FIGURES)
        return result | metrics

    @contextmanager
    def _evaluating(self, split: str, mode: EvaluationMode) -> Iterator[None]:
        """Evaluation mode on the bare model, with averaged weights where there are any and streams of its own."""
        evaluation, preparation, bare = self._evaluator.evaluation, self.preparation, self.unwrap(self.model)
        if self.ema is not None:
            evaluation.announce_averaged(getattr(self.ema, "decay", None))
        evaluating = evaluation.mode(
            self.model,
            bare,
            seed=derive_seed(self.seed, mode, split, self.placement.stream_index),
            equalize=self.broadcast_buffers,
            averaged=partial(preparation.averaged, self.ema) if self.ema is not None else None,
        )
        with preparation.evaluating(self.model), self._session.collecting(), evaluating, self._in_mode(mode, bare):
            yield

    # Called alone

    def _alone_evaluate_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        return self._evaluator.alone("evaluate", call, data)

    def _alone_infer_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        return self._evaluator.alone("infer", call, data)

    # Inference

    @overload
    def infer(self, split: str | None = None, *, stream: Literal[False] = False) -> list[Any]: ...
    @overload
    def infer(self, split: str | None = None, *, stream: Literal[True]) -> Iterator[Any]: ...
    def infer(self, split: str | None = None, *, stream: bool = False) -> list[Any] | Iterator[Any]:
        """Predict every sample of a split. Call on all ranks.

        Args:
            split: The split; `None` is the first one named for inference, else the first one to evaluate.
            stream: Yield predictions as they are made, of this rank's share only, instead of gathering them.

        Returns:
            The predictions in the order of the dataset, the same on all ranks: a list of tensors on the CPU, or of plain values
            where a prediction is a single number. With `stream`, a generator.

            What `infer_step` returns is taken apart by sample: a tensor along its first dimension; a list by its items; a tuple of
            such, several outputs of a model, into a tuple for each sample; a mapping into one for each sample, of the entries that
            have as many items as the batch has samples (a `loss` has not). Anything else is one item for the whole batch.

        Raises:
            ValueError: If the split is unknown, or there is none.
        """
        chosen = self._splits.choose(split, self._splits.to_infer(self.evaluate_splits), "infer")[0]
        return self._evaluator.stream(chosen) if stream else self._evaluator.infer(chosen)

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch; a target that comes with it is left aside. Called on all ranks.

        Called alone, it is made as in `infer`, without gradients.

        Args:
            data: The batch; within `infer` it is on the device.

        Returns:
            A tensor, list, tuple or mapping with an entry for each sample, as `infer` takes them apart.
        """
        return self._evaluator.forward.infer(data)
