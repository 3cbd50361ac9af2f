"""Evaluation and inference of whole splits: from their batches to metrics and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from danling.data import Batch, BatchSource
from danling.distributed import Placement
from danling.metrics import Meters, MetricSet

from .batches import count_samples, nodes_of_graphs, note_batch
from .evaluation import Evaluation, EvaluationSums, Trial, checked_figures, even_out, try_one_batch
from .forward import EvaluationForward
from .keys import RandomKeys
from .predictions import gather_predictions, split_by_sample
from .weighing import BatchLoss

EvaluationMode = Literal["evaluate", "infer"]


class EvaluationHooks(Protocol):
    """The hooks of a run that an evaluation calls. They are looked up each time, since a user may override them."""

    def _run_evaluate_step(self, step: Callable[[Any], Any], data: object) -> object:
        """Call a step the way the stack calls it."""

    def evaluate_step(self, data: object) -> object:
        """Return the prediction of a batch and its loss."""

    def infer_step(self, data: object) -> object:
        """Return the prediction of a batch."""

    def summarize(self, split: str, totals: Meters) -> Mapping[str, float]:
        """Return the metrics of an evaluation."""

    def to_device(self, data: object) -> object:
        """Return the data of a batch on the device."""

    def batch_weight(self, data: object, target: object) -> float | Tensor:
        """Return what the mean-reduced loss of a batch is averaged over."""


@dataclass(frozen=True)
class EvaluatedRun:
    """What an evaluation needs to know of the run that it belongs to.

    Attributes:
        placement: The ranks that share data, reductions and forwards with this one.
        keys: Seeds the random streams for each batch.
        weights: Weighs batches.
        meters: Returns the meters that a step may add to.
        metrics: Returns what is computed beside the loss.
        sums_loss: Returns whether the loss is a sum over what its weight counts, instead of a mean.
        together: Returns whether a forward is a collective, so that all ranks must make equally many.
        written: Returns the tensors that a forward may write to.
    """

    placement: Placement
    keys: RandomKeys
    weights: BatchLoss
    meters: Callable[[], Meters]
    metrics: Callable[[], MetricSet]
    sums_loss: Callable[[], bool]
    together: Callable[[], bool]
    written: Callable[[], Iterable[Tensor]]


class EvaluationSources:
    """Where the batches of an evaluated split come from, without moving the position of training."""

    def __init__(
        self,
        *,
        check: Callable[[str], None],
        trained: Callable[[], Sequence[str]],
        datasets: Callable[[], Mapping[str, object]],
        loaders: Callable[[], Mapping[str, object]],
        source: Callable[[str], BatchSource],
        open: Callable[[str, Any], BatchSource],
        build: Callable[[str, Any], Any],
    ) -> None:
        self.check = check
        self.trained = trained
        self.datasets = datasets
        self.loaders = loaders
        self.source = source
        self.open = open
        self.build = build

    def of(self, split: str) -> BatchSource:
        """Return the batches of a split. For a split to train on it is a separate pass, which does not move its position."""
        if split not in self.trained():
            return self.source(split)
        if split in self.datasets():
            return self.open(split, self.build(split, self.datasets()[split]))
        if self.source(split).consumed:
            raise ValueError(
                f"Expected a loader of its own to evaluate split {split!r} in the middle of training on it: its loader would lose "
                f"its position. Received: {type(self.loaders()[split]).__name__} in `self.dataloaders`. Put a dataset into "
                "`self.datasets` instead, or a second loader under another split name."
            )
        return self.open(split, self.loaders()[split])


class Evaluator:
    """Evaluates and predicts splits exactly: every sample of every rank counts once, and the state of training does not change."""

    def __init__(
        self,
        hooks: EvaluationHooks,
        *,
        run: EvaluatedRun,
        sources: EvaluationSources,
        evaluation: Evaluation,
        forward: EvaluationForward,
        entered: Callable[[str, EvaluationMode], AbstractContextManager[None]],
        paced: Callable[[Iterator[Batch]], Iterator[Batch]],
    ) -> None:
        self.evaluation = evaluation
        self.forward = forward
        self._hooks = hooks
        self._run = run
        self._sources = sources
        self._entered = entered
        self._paced = paced
        self._has_tried = False
        self.batch_weight: float | Tensor = 1.0

    # Metrics

    def evaluate(self, split: str, limit: int | None) -> dict[str, float]:
        """Return the metrics of a split."""
        self._sources.check(split)
        sums = self.sums(split, limit)
        figures = self._figures(split, sums.totals)
        if limit is not None:
            # Of a part of a split, the number of batches and ranks decides which one.
            placement = self._run.placement
            # Ranks that divide a sequence have a loss each of the same samples.
            counted = [sums.samples, 1.0] if placement.counts_loss else [0.0, 0.0]
            summed = placement.optimizer.all_reduce(torch.tensor(counted, dtype=torch.float64)).tolist()
            figures.setdefault("samples", summed[0] * placement.data.size / summed[1])
        return figures

    def _figures(self, split: str, totals: Meters) -> dict[str, float]:
        return checked_figures("summarize", split, self._hooks.summarize(split, totals))

    def sums(self, split: str, limit: int | None, source: BatchSource | None = None) -> EvaluationSums:
        """Evaluate a pass, or its first batches. What a step adds to `meters` belongs to the evaluation, not to the open epoch."""
        run, hooks = self._run, self._hooks

        def evaluate_step(data: object) -> object:
            try:
                return hooks._run_evaluate_step(hooks.evaluate_step, data)
            except Exception as error:
                note_batch(error, "evaluate_step", split, data)
                raise

        sums = EvaluationSums(
            evaluate_step,
            weigh=self._weigh,
            to_device=lambda data: hooks.to_device(data),
            metrics=run.metrics(),
            sums_loss=run.sums_loss(),
        )
        meters = run.meters()
        with meters.aside():
            with self._entered(split, "evaluate"):
                batches = islice(self._pass_over(source or self._sources.of(split)), limit)
                paced = self._paced(self.evaluation.between(split, batches))
                sums.add_all(self._keyed("evaluate", split, paced))
            sums.totals.merge(meters)
        return sums

    def _weigh(self, batch: Batch, data: object) -> tuple[float | Tensor, float]:
        weight, samples = self._run.weights.weigh(batch, data)
        self.batch_weight = weight
        return weight, samples

    def _pass_over(self, source: BatchSource) -> Iterator[Batch]:
        source.rewind()
        batches, placement = source.batches(), self._run.placement
        if self._run.together():
            batches = even_out(batches, ranks=placement.optimizer, readers=placement.data, reads=source.reads)
        yield from batches
        source.rewind()

    def _keyed(self, mode: EvaluationMode, split: str, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._run.keys.begin_batch(mode, split, batch.place)
            yield batch

    # Before the first update

    def try_once(self, splits: Iterable[str], judge: Callable[[str, Trial], None]) -> None:
        """Evaluate one batch of each split, once in a run, so that an error in evaluation shows before training begins.

        Meters and buffers are restored. Splits whose loader can be iterated only once are left out.
        """
        if self._has_tried:
            return
        self._has_tried = True
        for split in splits:
            if split in self._sources.datasets() or split not in self._sources.trained():
                tried = try_one_batch(
                    self._sources.of(split),
                    reopen=partial(self._sources.open, split),
                    evaluate=partial(self.sums, split, 1),
                    summarize=partial(self._figures, split),
                    written=self._run.written(),
                )
                if tried is not None:
                    judge(split, tried)

    # Called alone

    def alone(self, mode: EvaluationMode, call: Callable[[object], object], data: object) -> object:
        """Run a step that a user calls alone, as in an evaluation: in evaluation mode, without gradients, on the device."""
        with self._entered("", mode), torch.no_grad():
            self._run.keys.begin_batch(mode, "", (self._run.placement.data.rank,))
            moved = self._hooks.to_device(data)
            return self._hooks._run_evaluate_step(call, moved) if mode == "evaluate" else call(moved)

    # Predictions

    def infer(self, split: str) -> list[Any]:
        """Return the predictions of a split in the order of the dataset, the same on all ranks."""
        with self._entered(split, "infer"):
            batches = self._paced(self._pass_over(self._sources.of(split)))
            mine = [self._predict(split, batch) for batch in self._keyed("infer", split, batches)]
        return self.forward.shared(gather_predictions(mine, self._run.placement.data))

    def stream(self, split: str) -> Iterator[Any]:
        """Yield the predictions of this rank; see `stream_batches`."""
        for predictions in self.stream_batches(split):
            yield from predictions

    def stream_batches(self, split: str) -> Iterator[list[Any]]:
        """Yield the predictions of this rank by batch. Between two batches the caller may train or stop."""
        batches, keys = self._pass_over(self._sources.of(split)), self._run.keys
        while True:
            with keys.evaluating():
                batch = next(batches, None)
            if batch is None:
                return
            with self._entered(split, "infer"):
                keys.begin_batch("infer", split, batch.place)
                predictions = self._predict(split, batch)
            yield predictions

    def _predict(self, split: str, batch: Batch) -> list[object]:
        data = self._hooks.to_device(batch.data)
        try:
            with torch.no_grad():
                pred = self._hooks.infer_step(data)
        except Exception as error:
            note_batch(error, "infer_step", split, data)
            raise
        samples = count_samples(data) if batch.samples is None else batch.samples
        rows = split_by_sample(pred, samples, nodes_of_graphs(data))
        return self.forward.counted(rows)
