"""Evaluation and inference: exact figures over the whole set, and training's streams and weights left as they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, Literal, overload

import torch
from torch import Tensor

from danling.config import RunnerConfig
from danling.data import Batch, BatchSource, derive_seed, move_to_device
from danling.metrics import Meters
from danling.training import (
    BatchWeights,
    Evaluation,
    EvaluationSums,
    call_model,
    checked_figures,
    count_samples,
    criterion_loss,
    criterion_setting,
    criterion_weight,
    even_out,
    gather_predictions,
    is_pair,
    model_loss,
    model_weight,
    prediction_of,
    split_by_sample,
    try_one_batch,
    unpack_batch,
    written_by_forward,
)
from danling.training.component_checks import check_metrics

from .base_runner import RESERVED_FIGURES
from .torch_state import TorchState

logger = logging.getLogger("danling")


class TorchEvaluation(TorchState):
    """Evaluation and inference of a torch runner."""

    def __init__(self, config: RunnerConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._evaluation = Evaluation(self.device, is_main=self.is_main_process)
        warns = self.is_main_process and not self._overrides("batch_weight")
        self._batch_weights = BatchWeights(learns=not self._overrides("train_step"), warns=warns)

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
        if self.criterion is None and not self._overrides("compute_loss"):
            model = self.unwrapped_model
            return model_weight(model, target, data, shifts=self.label_shift.shifts(model))
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
        found = model_loss(pred)
        if found is None:
            raise ValueError(
                f"Expected a criterion, or a model that returns a loss. Received: criterion=None and a prediction of type "
                f"{type(pred).__name__}. Assign `self.criterion`, or override `compute_loss`."
            )
        if self._observes_labels and self._observe_labels(pred, found, target) and self.mode == "train":
            self._reweigh(target)
        return found

    def _reweigh(self, target: Any) -> None:
        """Weigh the open micro-batch by what its loss has just told; padding stays without weight."""
        if self.window.count and self.window.current:
            self.window.reweigh(self.batch_weight(None, target))

    @property
    def _observes_labels(self) -> bool:
        """Whether it is still to be found out which labels the loss of the model counts."""
        return self.label_shift.is_open and self.criterion is None

    def _observe_labels(self, pred: Any, loss: Tensor, target: Any) -> bool:
        """Return whether another weight of the batch follows from the loss that the model gave it."""
        if self._overrides("batch_weight") or self._overrides("compute_loss"):
            self.label_shift.is_open = False
            return False
        changes = self.label_shift.observe(loss, prediction_of(pred), target)
        self._say_of_labels()
        return changes

    def _say_of_labels(self) -> None:
        if self.label_shift.complaint is not None and self.is_main_process:
            logger.warning("%s", self.label_shift.complaint)

    def evaluated_loss(self, pred: Any, target: Any) -> Tensor | None:
        """Return the loss of an evaluated batch: that of training, `None` where there is none. Called on all ranks.

        A batch without a target has a loss if the batches to train on have no target either, as those of an autoencoder; if they do
        have one, there is nothing to compare its prediction with.

        Args:
            pred: What the model returned, any type.
            target: The target of the batch, `None` without one.
        """
        overridden = self._overrides("compute_loss")
        has_loss = overridden or self.criterion is not None
        if target is None:
            targetless = self._trains_targetless()
            has_loss = overridden if targetless is None else targetless and has_loss
        if has_loss:
            return self.compute_loss(pred, target)
        found = model_loss(pred) if self.criterion is None else None
        if found is not None and self._observes_labels:
            self._observe_labels(pred, found, target)
        return found

    def _trains_targetless(self) -> bool | None:
        """Whether the batches to train on come without a target, `None` where nobody can tell before the first one."""
        split = next((name for name in self.train_splits if name in self.datasets and name in self.sources), None)
        if self._batch_weights.targetless is None and split is not None:
            settings = self._splits.settings(split)
            # Files that workers are to open stay closed here, and a dataset may have other keys than positions.
            if self.sources[split].kind == "position" and not (
                settings.get("num_workers") or settings.get("collate_fn")
            ):
                self._batch_weights.look_at(self.datasets[split], self.device)
        return self._batch_weights.targetless

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
        return self._evaluate(split, None)

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
        return self._evaluate(split, steps if steps is not None else max((self.steps or 0) // 20, 1))

    def _evaluate(self, split: str, limit: int | None) -> dict[str, float]:
        self._splits.check(split)
        sums = self._sum_batches(split, limit)
        return checked_figures("summarize", split, self.summarize(split, sums.totals))

    def _sum_batches(self, split: str, limit: int | None, source: BatchSource | None = None) -> EvaluationSums:
        """Evaluate a pass, or its first batches; what a step puts into `meters` meanwhile belongs to it, not to the open epoch."""
        sums = EvaluationSums(
            self.evaluate_step,
            weigh=lambda batch, data: self._batch_weights.weigh(batch, data, self.batch_weight),
            to_device=self.to_device,
            metrics=self.metric_set,
            sums_loss=self.sums_loss,
            undecided=lambda: self._observes_labels,
        )
        with self.meters.aside():
            with self._evaluating(split, "evaluate"):
                batches = islice(self._pass_over(source or self._evaluation_source(split)), limit)
                sums.add_all(self._session.paced(self._evaluation.between(split, batches)))
            sums.totals.merge(self.meters)
        return sums

    def _try_evaluations(self, splits: Sequence[str]) -> None:
        """Evaluate one batch of each split before the first update, so that an error in it comes before anything is trained.

        Streams, meters and buffers are left as they were. Left out are splits whose batches are given once, and evaluations of
        the user's own.
        """
        verb = "evaluate_steps" if self.is_step_mode else "evaluate_epoch"
        if self._evaluation.tried or not self.config.try_evaluation:
            return
        if self._overrides(verb) or self._overrides("evaluate"):
            return
        self._evaluation.tried = True
        for split in splits:
            if split in self.datasets or split not in self.train_splits:
                self._try_evaluation(split)

    def _try_evaluation(self, split: str) -> None:
        tried = try_one_batch(
            self._evaluation_source(split),
            reopen=partial(self.sources.open, split),
            evaluate=partial(self._sum_batches, split, 1),
            summarize=lambda totals: checked_figures("summarize", split, self.summarize(split, totals)),
            written=written_by_forward(
                self.unwrapped_model, self._criterion_tensors("buffers"), getattr(self.ema, "weights", None)
            ),
        )
        board = self.standing.board
        if tried is None or tried.figures is None or board is None or board.split != split or self.standing.own:
            return
        if not (board.name == "loss" and tried.scored):
            board.check({split: tried.figures})

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients. Called on all ranks.

        Called alone, it is made as in an evaluation: on the bare model in evaluation mode, with averaged weights where there are any, and
        training's random streams are left as they were.

        Args:
            data: The batch; within an evaluation it is on the device.

        Returns:
            The prediction, and the loss as the criterion reduces it; `None` for a batch that has none.
        """
        inputs, target = data if is_pair(data) else unpack_batch(data, self.unwrapped_model)
        with self.forward_context() or nullcontext():
            pred = call_model(self.model, inputs)
            return pred, self.evaluated_loss(pred, target)

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
    def _evaluating(self, split: str, mode: Literal["evaluate", "infer"]) -> Iterator[None]:
        """Evaluation mode on the bare model, with averaged weights where there are any and streams of its own."""
        wrapped, before = self.model, self.mode
        if self.ema is not None:
            self._evaluation.announce_averaged(getattr(self.ema, "decay", None))
        evaluating = self._evaluation.mode(
            wrapped,
            self.unwrap(wrapped),
            seed=derive_seed(self.seed, mode, split, self.placement.stream_index),
            equalize=self.equalize_buffers,
            averaged=self.averaged_weights if self.ema is not None else None,
        )
        with self._session.collecting(), evaluating:
            self.model, self.mode = self.unwrap(wrapped), mode
            try:
                yield
            finally:
                self.model, self.mode = wrapped, before

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return the context in which the model has its averaged weights; entered on all ranks."""
        applied: AbstractContextManager[None] = self.ema.applied()
        return applied

    def _pass_over(self, source: BatchSource) -> Iterator[Batch]:
        source.rewind()
        batches = source.batches()
        if self._evaluates_together:
            batches = even_out(batches, ranks=self.placement.optimizer, readers=self.data_domain, reads=source.reads)
        yield from batches
        source.rewind()

    @property
    def _evaluates_together(self) -> bool:
        """Whether a forward is a collective, so that all ranks must make equally many in an evaluation."""
        return False

    def _evaluation_source(self, split: str) -> BatchSource:
        if split in self.train_splits:
            # A pass of its own, so that evaluating a training split does not move training's position.
            if split in self.datasets:
                return self.sources.open(split, self.build_dataloader(split, self.datasets[split]))
            if self.source(split).consumed:
                raise ValueError(
                    f"Expected a loader of its own to evaluate split {split!r} in the middle of training on it: its loader would lose "
                    f"its place. Received: {type(self.dataloaders[split]).__name__} in `self.dataloaders`. Put a dataset into "
                    "`self.datasets` instead, or a second loader under another split name."
                )
            return self.sources.open(split, self.dataloaders[split])
        return self.source(split)

    # Called alone

    def _called_alone(self, verb: str) -> bool:
        """Whether no loop has called one of the verbs of `danling.runners.alone`."""
        return self.mode == "train" and not self._in_train_step

    def _alone_evaluate_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        with self._evaluating("", "evaluate"), torch.no_grad():
            return call(self.to_device(data))

    def _alone_infer_step(self, call: Callable[[Any], Any], data: Any) -> Any:
        with self._evaluating("", "infer"), torch.no_grad():
            return call(self.to_device(data))

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
        if stream:
            return self._stream(chosen)
        with self._evaluating(chosen, "infer"):
            batches = self._session.paced(self._pass_over(self._evaluation_source(chosen)))
            mine = [self._predict_batch(batch) for batch in batches]
        return gather_predictions(mine, self.data_domain)

    def _stream(self, split: str) -> Iterator[Any]:
        # Whenever the caller goes on, the runner is as it was: the caller may train, save, or never ask for more.
        for batch in self._pass_over(self._evaluation_source(split)):
            with self._evaluating(split, "infer"):
                predictions = self._predict_batch(batch)
            yield from predictions

    def _predict_batch(self, batch: Batch) -> list[Any]:
        data = self.to_device(batch.data)
        with torch.no_grad():
            pred = self.infer_step(data)
        return split_by_sample(pred, count_samples(data) if batch.samples is None else batch.samples)

    def infer_step(self, data: Any) -> Any:
        """Return the prediction of one batch; a target that comes with it is left aside. Called on all ranks.

        Called alone, it is made as in `infer`, without gradients.

        Args:
            data: The batch; within `infer` it is on the device.

        Returns:
            A tensor, list, tuple or mapping with an entry for each sample, as `infer` takes them apart.
        """
        inputs, _ = unpack_batch(data, self.unwrapped_model)
        with self.forward_context() or nullcontext():
            return call_model(self.model, inputs)
