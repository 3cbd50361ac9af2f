"""Evaluation and inference of whole splits, with the state of training unchanged."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from danling.data import PLACEHOLDER, Batch, BatchSource, DataLoader
from danling.data.run_data import RunData
from danling.distributed import Domain, all_arrive
from danling.metrics import Meters, MetricSet
from danling.metrics.collection import can_be_drawn, has_halves
from danling.optim.state import evaluation_weights
from danling.utils.tensors import whole

from .batch_weights import BatchLoss
from .batches import (
    call_model,
    check_returned,
    is_pair,
    nodes_of_graphs,
    not_one_loss,
    note_batch,
    peek_target,
    prediction_of,
    unpack_batch,
)
from .keys import RandomKeys
from .metric_checks import GivenMetrics
from .recompute import BufferCopies, Recompute
from .results import checked_figures
from .sample_count import find_samples, left_samples
from .session import TrainingSession
from .update import UpdateStep

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

EvaluationMode = Literal["evaluate", "infer"]

_MANY_BATCHES = 1000
"""So many batches of an evaluation are read before a stream of unknown length is named."""

_PATIENCE_SECONDS = 5.0
"""How long a rank that fails waits to hear whether all of them do."""


class EvaluationForward:
    """Evaluates and predicts single batches where this rank has the whole model; a stack that divides the model overrides it."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner

    def evaluate(self, data: Any) -> tuple[Any, Tensor | None]:
        """Return the prediction of a batch, and its loss."""
        runner = self.runner
        inputs, target = data if is_pair(data) else unpack_batch(data, runner.unwrapped_model)
        with runner.forward_context() or nullcontext():
            pred = call_model(runner.model, inputs)
            return pred, runner.evaluated_loss(pred, target)

    def infer(self, data: object) -> Any:
        """Return the prediction of a batch; a target that comes with it is left aside."""
        inputs, _ = unpack_batch(data, self.runner.unwrapped_model)
        with self.runner.forward_context() or nullcontext():
            return call_model(self.runner.model, inputs)

    def counted(self, predictions: list[Any]) -> list[object]:
        """Return what counts of the predictions of this rank for a batch, one for each sample."""
        return predictions

    def shared(self, predictions: list[Any]) -> list[Any]:
        """Return the predictions of a split, also on ranks that have made none."""
        return predictions


class Evaluator:
    """Evaluates and predicts splits exactly: every sample of every rank counts once, and the state of training does not change.

    Attributes:
        forward: Evaluates and predicts single batches.
        batch_weight: Weight of the batch that is evaluated, or was last.
    """

    def __init__(
        self,
        runner: TorchRunner,
        session: TrainingSession,
        keys: RandomKeys,
        data: RunData,
        loss: BatchLoss,
        metrics: MetricSet,
        given_metrics: GivenMetrics,
        update: UpdateStep,
        recompute: Recompute,
    ) -> None:
        self.runner = runner
        self.forward = runner.build_forward()
        self._session = session
        self._keys = keys
        self._data = data
        self._loss = loss
        self._metrics = metrics
        self.check_metrics = given_metrics.check
        self._update = update
        self._recompute = recompute
        self._run_step = runner._run_evaluate_step
        self.batch_weight: float | Tensor = 1.0
        self.exact = runner.config.gradient_sum == "canonical"
        """Whether an evaluation has the same bits at any number of ranks."""
        self.has_tried = False
        """Whether the trial of one batch of each split is made, or made by the ranks that this one joins."""
        self._has_said_averaged = False
        self._long: set[str] = set()
        self._is_trying = False
        self._no_means: set[str] = set()
        self._logged_orders: set[str] = set()
        self._without_targets: set[str] = set()
        """Splits of which it was logged that no target counts."""

    # Metrics

    def evaluate(self, split: str, limit: int | None) -> dict[str, float]:
        """Return the metrics of a split, or of its first `limit` batches."""
        runner = self.runner
        self._data.check(split)
        self.check_metrics()
        self._update.check_updates_made()  # its weights may be NaN
        quick = runner.config.audit.quick
        # A run that only shows that a program works evaluates a few batches.
        if quick is not None:
            limit = quick if limit is None else min(limit, quick)
        own = limit
        if limit is not None and self.exact:
            # The first batches over all ranks, which take them in turn.
            own = max(-(-(limit - runner.data_domain.rank) // runner.data_domain.size), 0)
        source = self._source(split)
        self._log_order(split, limit, source)
        with self._session.evaluating(split):
            totals, scored, samples = self._sums(split, own, source)
            metrics = checked_figures("summarize", split, runner.summarize(split, totals))
        if scored and math.isnan(metrics.get("loss", 0.0)):
            # A NaN may also be the loss of the model, which has a weight.
            self._log_ignored(split, limit, totals)
        if limit is not None:
            # Of a part of a split, the number of batches and ranks decides which one.
            placement = runner.placement
            # Ranks that divide a sequence have a loss each of the same samples.
            counted = [samples, 1.0] if placement.counts_loss else [0.0, 0.0]
            summed = placement.optimizer.all_reduce(
                torch.tensor(counted, dtype=torch.float64)
            ).tolist()
            metrics.setdefault("samples", summed[0] * placement.data.size / summed[1])
        return metrics

    def _log_order(self, split: str, limit: int | None, source: BatchSource) -> None:
        """Log once for a split which of its samples are read, where not all are, or where settings say otherwise for training."""
        runner, loader = self.runner, source.loader
        if (
            split in self._logged_orders
            or not runner.is_main_process
            or not isinstance(loader, DataLoader)
        ):
            return
        samples = loader.order.length
        division = loader.order.division
        # Of a canonical sum, the limit counts the batches of all ranks.
        counted = division.micro_batch_size if self.exact else division.samples
        first = samples if limit is None else min(samples, limit * counted)
        settings = self._data.settings_of_training(split)
        if first == samples and not settings:
            return
        self._logged_orders.add(split)
        order = "their own order" if loader.order.shuffle else "the order of the dataset"
        which, more = f"all {samples}", ""
        if first < samples:
            which = f"the first {first} of {samples}"
            more = " Call `evaluate`, or override `evaluate_steps`, for all of them."
        why = f" Only training reads by {' and '.join(settings)}." if settings else ""
        logger.info(
            "An evaluation reads %s samples of split %r, in %s.%s%s", which, split, order, why, more
        )

    def _log_ignored(self, split: str, limit: int | None, totals: Meters) -> None:
        """Log once a split that its loss is NaN where none of its targets counts."""
        has_weight = "loss" in totals and totals["loss"].weight
        if has_weight or split in self._without_targets or not self.runner.is_main_process:
            return
        self._without_targets.add(split)
        text = (
            f"No evaluated target of split {split!r} counts: all are ignored, so its loss is NaN."
        )
        if limit is not None:
            text += f" Its first {limit} batches were evaluated; override evaluate_steps to evaluate more of them."
        logger.warning("%s", text)

    def _source(self, split: str) -> BatchSource:
        """Return the batches of a split. For a split to train on it is a separate pass, which does not move its position."""
        runner = self.runner
        # A split that is only evaluated has its own loader, whose position is that of no training.
        if split not in runner.train_splits:
            return self._data.begin(split)
        if split in runner.datasets:
            with self._data.reading_once():
                source = self._data.open(
                    split, runner.build_dataloader(split, runner.datasets[split])
                )
            source.tell_epoch()
            return source
        if runner.source(split).consumed:
            raise ValueError(
                f"Expected a separate loader to evaluate split {split!r} in the middle of training on it: its loader would lose "
                f"its position. Received: {type(runner.dataloaders[split]).__name__} in `self.dataloaders`. Put a dataset into "
                "`self.datasets` instead, or a second loader under another split name."
            )
        return self._data.open(split, runner.dataloaders[split])

    def _sums(
        self, split: str, limit: int | None, source: BatchSource
    ) -> tuple[Meters, bool, float]:
        """Evaluate a pass, or its first batches: return sums by metric, whether there was a loss, and the samples that have any result.

        What a step adds to `meters` belongs to the evaluation, not to the open epoch.
        """
        runner = self.runner
        metrics = self._metrics
        totals = Meters(exact=self.exact)
        scored, evaluated = False, 0.0
        tried: tuple[Any, Any, int | None] | None = None
        metrics.reset()
        counted = self._loss.count if metrics else left_samples
        is_unbounded = limit is None and not _has_length(source.loader)
        read = self._pass_over(source, limit, is_unbounded=is_unbounded)
        with runner.meters.isolated(exact=self.exact):
            with self._entered("evaluate"), torch.no_grad():
                batches = self._session.between_batches(
                    split, read, sync=self._update.sync, domain=runner.placement.optimizer
                )
                for batch in batches:
                    self._keys.begin_batch("evaluate", split, batch.place)
                    data = runner.to_device(batch.data)
                    weight, samples = self._loss.weigh(batch, data)
                    samples = counted(data, samples)
                    self.batch_weight = weight
                    pred, loss = self._evaluated(split, data)
                    # Padding has no samples: a rank that has only padding waits for the loss of another one.
                    if loss is not None and samples:
                        totals.expect("loss")
                    # Whether a weight on a device is zero is not asked: the host would wait.
                    may_weigh = isinstance(weight, Tensor) or weight
                    if loss is not None and may_weigh:
                        if self._loss.sums:
                            totals.add_totals("loss", loss, weight)
                        else:
                            totals.update({"loss": loss}, weight)
                    if metrics and pred is not None:
                        metrics.update(prediction_of(pred), peek_target(data), samples)
                        if self._is_trying and samples:
                            number = batch.read if batch.samples is None else int(samples)
                            tried = prediction_of(pred), peek_target(data), number
                    scored = scored or loss is not None
                    evaluated += samples if pred is not None or loss is not None else 0
                if self._is_trying:
                    self._name_no_means(split, tried)
            # What `evaluate_step` has logged; put aside are the meters of the open epoch.
            totals.merge(runner.meters)
        return totals, scored, evaluated

    def _evaluated(self, split: str, data: object) -> tuple[Any, Any]:
        """Return the prediction and the loss of a batch."""
        try:
            returned = self._run_step(self.runner.evaluate_step, data)
            check_returned(returned, "evaluate_step")
        except Exception as error:
            note_batch(error, "evaluate_step", split, data)
            raise
        pred, loss = returned
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise not_one_loss(loss)
        if isinstance(loss, Tensor) and type(loss) is not Tensor:
            loss = whole(loss)
        return pred, loss

    def _pass_over(
        self, source: BatchSource, limit: int | None = None, *, is_unbounded: bool = False
    ) -> Iterator[Batch]:
        # Before, for a pass that an exception has left half-way, and after, so that the next one begins at the first sample.
        source.rewind()
        placement = self.runner.placement
        batches: Iterator[Batch] = islice(source.batches(), limit)
        if is_unbounded:
            batches = self._named_where_long(batches, source.split)
        if self.runner.preparation.evaluates_together:
            batches = even_out(
                batches, ranks=placement.optimizer, readers=placement.data, reads=source.reads
            )
        try:
            yield from batches
        finally:
            self._data.end_evaluation(source)
        source.rewind()

    def _named_where_long(self, batches: Iterator[Batch], split: str) -> Iterator[Batch]:
        """Yield batches of a loader of unknown length, and say once that they are many: it may have no end."""
        for number, batch in enumerate(batches, 1):
            if number == _MANY_BATCHES and self.runner.is_main_process and split not in self._long:
                self._long.add(split)
                logger.warning(
                    "Split %r is a stream of unknown length, of which %d batches were read by now: all of it is evaluated. For one that "
                    "does not end, override `evaluate_epoch(self, split)` with `return self.evaluate_steps(split, 20)`.",
                    split,
                    number,
                )
            yield batch

    @contextmanager
    def _entered(self, mode: EvaluationMode) -> Iterator[None]:
        """Evaluation mode on the bare model and the criterion, with averaged weights if there are any; on exit all is as it was."""
        runner, preparation = self.runner, self.runner.preparation
        wrapped, bare = runner.model, runner.unwrap(runner.model)
        before = wrapped, runner.mode, runner.carry
        # The order matters: averages are put in last and taken out first, so that the optimizer finds the weights that it has put in.
        with ExitStack() as stack:
            stack.enter_context(self._keys.evaluating())
            stack.enter_context(preparation.evaluating(wrapped))
            stack.enter_context(evaluation_weights(runner.optimizer))
            # The criterion has a mode too: one that keeps centres or statistics must not learn from what is evaluated.
            criteria = [each for each in (runner.criterion,) if isinstance(each, nn.Module)]
            roots = [wrapped, *criteria]
            was_training = [root.training for root in roots]
            modes = [(module, module.training) for root in roots for module in root.modules()]
            # Each of several optimizers has another window, which is empty in a block that is not due.
            is_within_update = self._session.in_step or runner.window.count > 0
            if is_within_update and runner.distributed:
                # Ranks go on with their own ones in the micro-batches of an update.
                copies = BufferCopies(runner)
                copies.take()
                stack.callback(copies.put_back)
            runner.broadcast_buffers()
            if runner.ema is not None:
                decay = getattr(runner.ema, "decay", None)
                if runner.is_main_process and not self._has_said_averaged:
                    logger.info(
                        "Evaluating the averaged weights%s.",
                        f" (decay {decay:g})" if decay is not None else "",
                    )
                self._has_said_averaged = True
                stack.enter_context(preparation.averaged(runner.ema))
                # Each rank averages its own buffers; a checkpoint keeps rank 0's.
                runner.broadcast_buffers()
            for each in (bare, *criteria):
                each.eval()
            runner.model = bare
            runner.mode = mode
            runner.carry = None
            try:
                yield
            finally:
                runner.model, runner.mode, runner.carry = before
                for root, training in zip(roots, was_training):
                    root.train(training)
                for module, is_training in modes:
                    # Parts may have been in another mode than the whole.
                    module.training = is_training

    # Before the first update

    def try_once(self, splits: Iterable[str]) -> None:
        """Evaluate one batch of each split, once in a run, so that an error in evaluation shows before training begins.

        Loader, meters, buffers, attributes and metrics are restored. Splits whose loader can be iterated only once are left out.
        """
        if self.has_tried:
            return
        self.has_tried = True
        for split in splits:
            if split in self.runner.datasets or split not in self.runner.train_splits:
                self._try(split)

    def _try(self, split: str) -> None:
        """Evaluate the first batch of a split.

        Some metrics need more than one batch, so an error of `summarize` is a warning if it comes on all ranks. If only some ranks fail,
        the others wait for them, and it is raised.
        """
        runner = self.runner
        source = self._source(split)
        if not source.can_restart:
            return
        # Training reads that batch again, from the same state.
        with self._session.evaluating(split), source.peek(), self._recompute.preserved():
            # How a pass began is remembered with the place in a loader of the user's, so its place in training is not moved.
            opened = source if source.kind == "position" else self._data.open(split, source.loader)
            self._is_trying = True
            try:
                totals, scored, _ = self._sums(split, 1, opened)
            finally:
                self._is_trying = False
            try:
                metrics = checked_figures("summarize", split, runner.summarize(split, totals))
            except Exception as error:
                if not all_arrive(f"tried/{split}", seconds=_PATIENCE_SECONDS):
                    raise
                logger.warning(
                    "The metrics of split %r cannot be computed from one batch (%s: %s). If they can be computed from the whole split, "
                    "ignore this; otherwise fix the metric or `summarize` now.",
                    split,
                    type(error).__name__,
                    error,
                )
            else:
                board = runner.standing.board
                is_of_split = board is not None and board.split == split and not runner.standing.own
                if board is not None and is_of_split and not (board.name == "loss" and scored):
                    board.check({split: metrics})
            finally:
                self._metrics.reset()

    def _name_no_means(self, split: str, tried: tuple[Any, Any, int | None] | None) -> None:
        # On all ranks or on none: a metric may communicate, and so may a prediction that is divided over ranks.
        mine = (True, True) if tried is None else (has_halves(*tried), can_be_drawn(tried[0]))
        found = self.runner.placement.optimizer.gather_objects(mine)
        if tried is None or not all(halves for halves, _ in found):
            return
        draws = all(drawn for _, drawn in found)
        for name, (of_batch, mean) in self._metrics.no_means(*tried[:2], draws=draws).items():
            if self.runner.is_main_process and name not in self._no_means:
                logger.warning(
                    "Expected metric %r to be a mean over samples. Received: %.4g for the targets of a batch of split %r, and a mean of "
                    "%.4g over their halves: an average over batches depends on the batch size. For a mean over something else, such as "
                    "tokens, return (sum, weight); else give an object with update, compute and reset, such as one of torchmetrics, or "
                    "compute it in `summarize`.",
                    *(name, of_batch, split, mean),
                )
            self._no_means.add(name)

    # A step that a user calls

    def call(self, mode: EvaluationMode, step: Callable[[object], object], data: object) -> object:
        """Run a step that a user calls directly, as in an evaluation: in evaluation mode, without gradients, on the device."""
        runner = self.runner
        with self._entered(mode), torch.no_grad():
            self._keys.begin_batch(mode, "", (runner.placement.data.rank,))
            moved = runner.to_device(data)
            return self._run_step(step, moved) if mode == "evaluate" else step(moved)

    # Predictions

    def infer(self, split: str) -> list[Any]:
        """Return the predictions of a split in the order of the dataset, the same on all ranks."""
        self._update.check_updates_made()
        with self._entered("infer"):
            source = self._source(split)
            self._log_order(split, None, source)
            mine = [self._predict(split, batch) for batch in self._pass_over(source)]
        return self.forward.shared(gather_predictions(mine, self.runner.placement.data))

    def stream_batches(self, split: str) -> Iterator[list[Any]]:
        """Yield the predictions of this rank by batch. Between two batches the caller may train or stop."""
        self._update.check_updates_made()
        source = self._source(split)
        self._log_order(split, None, source)
        batches = self._pass_over(source)
        while True:
            # Reading and predicting are two contexts: the caller may train between two batches, in its own mode.
            with self._keys.evaluating():
                batch = next(batches, None)
            if batch is None:
                return
            with self._entered("infer"):
                predictions = self._predict(split, batch)
            yield predictions

    def _predict(self, split: str, batch: Batch) -> list[object]:
        runner = self.runner
        self._keys.begin_batch("infer", split, batch.place)
        data = runner.to_device(batch.data)
        try:
            with torch.no_grad():
                pred = runner.infer_step(data)
        except Exception as error:
            note_batch(error, "infer_step", split, data)
            raise
        samples = batch.samples
        if samples is None:
            # A list has an item for each sample: only where there is padding are some left out.
            samples = len(pred) if isinstance(pred, list) else find_samples(data, batch.read)[0]
        elif not isinstance(pred, list):
            samples = int(left_samples(data, samples))
        return self.forward.counted(split_by_sample(pred, samples, nodes_of_graphs(data)))


def even_out(
    batches: Iterator[Batch], *, ranks: Domain, readers: Domain, reads: bool = True
) -> Iterator[Batch]:
    """Yield batches until no rank has one, equally many on all: a rank that ran out repeats its last one, which weighs nothing.

    Where a forward is a collective of the ranks that share parameters, all of them must make the same number.
    """
    # A rank that reads nothing, such as a middle stage of a pipeline, needs no data to take part.
    spare = None if reads else Batch(PLACEHOLDER, 0, 0)
    while True:
        batch = next(batches, None)
        is_real = batch is not None and batch.data is not PLACEHOLDER
        has_nothing = not is_real and spare is None
        flags = ranks.all_reduce(
            torch.tensor([float(is_real), float(has_nothing)], dtype=torch.float64)
        )
        some_have, some_lack = flags.tolist()
        if not some_have:
            return
        # A rank without any batch of its own repeats one of another rank.
        if some_lack:
            mine = batch if is_real else None
            offered = [found for found in readers.gather_objects(mine) if found is not None]
            if spare is None and offered:
                spare = Batch(offered[0].data, 0, 0)
        if batch is not None and is_real:
            spare = Batch(batch.data, 0, 0)
        chosen = batch or spare
        assert chosen is not None
        yield chosen


def split_by_sample(pred: object, samples: int, parts: Sequence[int] | None = None) -> list[object]:
    """Return the prediction of a batch as a list with an item for each sample, on the CPU.

    A tensor is taken apart along its first dimension, into plain numbers where a sample has a single one; a list by its items; a tuple
    of such, several outputs of a model, into a tuple for each sample; a mapping into one for each sample, of the entries that have as
    many items as the batch has samples. Anything else is one item for the whole batch. Where each sample has several parts, as a graph
    has nodes, a tensor with a row for each part is taken apart into a tensor for each sample, and one with as many rows as neither, such as
    one for each edge, is left whole.
    """
    if not samples:
        return []
    # Of an object with `loss` and `logits`, the logits; the entries of a mapping are taken apart below.
    if not isinstance(pred, (Mapping, tuple)):
        pred = prediction_of(pred)
    if isinstance(pred, Tensor) and parts is not None and pred.ndim:
        if len(pred) == sum(parts) != len(parts):
            # A row for each part of a sample, such as the nodes of a graph.
            whole = pred.detach().cpu()
            of_samples: list[object] = [
                whole[end - count : end] for count, end in zip(parts, accumulate(parts))
            ]
            return of_samples[:samples]
        # A row for something else, such as an edge, belongs to no sample.
        if len(pred) != len(parts):
            return [pred.detach().cpu()]
    if isinstance(pred, Tensor):
        rows = pred.detach().cpu()[:samples]
        has_single_number = rows.ndim == 1 or (rows.ndim == 2 and rows.shape[1] == 1)
        return rows.flatten().tolist() if has_single_number else list(rows.unbind(0))
    if isinstance(pred, Mapping):
        columns = {
            name: split_by_sample(value, samples, parts)
            for name, value in pred.items()
            if _has_rows(value, samples, parts)
        }
        return [dict(zip(columns, row)) for row in zip(*columns.values())] if columns else [pred]
    if isinstance(pred, tuple) and pred and all(_has_rows(part, samples, parts) for part in pred):
        return list(zip(*(split_by_sample(part, samples, parts) for part in pred)))
    return list(pred)[:samples] if isinstance(pred, list) else [pred]


def gather_predictions(batches: Sequence[Sequence[object]], domain: Domain) -> list[object]:
    """Return the predictions of all ranks in the order of the dataset, the same on all of them.

    Ranks take the batches of a split in turn, so the first batches of all ranks come before the second ones.
    """
    ranks: list[Sequence[Sequence[Any]]] = domain.gather_objects(batches)
    rounds = max(map(len, ranks), default=0)
    return [
        item for turn in range(rounds) for mine in ranks if turn < len(mine) for item in mine[turn]
    ]


def _has_rows(value: Any, samples: int, parts: Sequence[int] | None) -> bool:
    is_rows = isinstance(value, Tensor) and value.ndim > 0
    if not (is_rows or isinstance(value, list)):
        return False
    return len(value) == samples or (is_rows and parts is not None and len(value) == sum(parts))


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
