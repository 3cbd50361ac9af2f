"""Evaluation and inference: exact figures over the whole set, and training's streams and weights left as they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import islice
from typing import Any, Literal, overload

import torch
from torch import Tensor

from danling.data import (
    Batch,
    BatchSource,
    can_glance,
    derive_seed,
    glanced,
    move_to_device,
    preserved_random_state,
)
from danling.distributed import all_arrive
from danling.metrics import Meters, as_number
from danling.training import (
    call_model,
    count_samples,
    criterion_loss,
    criterion_setting,
    criterion_weight,
    model_loss,
    model_weight,
    peek_target,
    prediction_of,
    preserved_tensors,
    unpack_batch,
    unweighed,
)
from danling.training.component_checks import check_metrics
from danling.utils.names import canonical_name

from .base_runner import RESERVED_FIGURES
from .runner_data import check_named_once
from .torch_state import TorchState

logger = logging.getLogger("danling")

_PATIENCE_SECONDS = 5.0
"""How long a rank that fails waits to hear whether all of them do."""


class TorchEvaluation(TorchState):
    """Evaluation and inference of a torch runner."""

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
            loss: Tensor = criterion_loss(self.criterion, prediction_of(pred), target)
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
        if target is not None:
            scored = self.criterion is not None or overridden
        else:
            bare = self._trains_bare()
            scored = overridden if bare is None else bare and (self.criterion is not None or overridden)
        if scored:
            return self.compute_loss(pred, target)
        found = model_loss(pred) if self.criterion is None else None
        if found is not None and self._observes_labels:
            self._observe_labels(pred, found, target)
        return found

    def _trains_bare(self) -> bool | None:
        """Whether the batches to train on come without a target, `None` where nobody can tell before the first one."""
        split = next((name for name in self.train_splits if name in self.datasets and name in self.sources), None)
        if self._bare is not None or split is None or self._overrides("train_step"):
            return self._bare
        settings = self.loader_settings(split)
        # Files that workers are to open stay closed here, and a dataset may have other keys than positions.
        if self.sources[split].kind == "position" and not (settings.get("num_workers") or settings.get("collate_fn")):
            with preserved_random_state(self.device), suppress(Exception):
                self._bare = peek_target(self.datasets[split][0]) is None
        return self._bare

    def _weigh(self, batch: Batch, data: Any) -> tuple[float | Tensor, float]:
        """Return weight and number of samples of a batch; padding has neither."""
        if batch.samples == 0:
            return 0.0, 0.0
        samples = count_samples(data) if batch.samples is None else batch.samples
        target = peek_target(data)
        if self._bare is None and self.mode == "train" and not self._overrides("train_step"):
            self._bare = target is None
        if target is None and self.mode == "train" and not self._said_unweighed:
            self._say_unweighed(data)
        return self.batch_weight(data, target), samples

    _said_unweighed: bool = False
    """Whether a batch without a target, beside a criterion that ignores some, was warned of; once is enough."""

    def _say_unweighed(self, data: Any) -> None:
        self._said_unweighed = True
        ignores = criterion_setting(self.criterion, "ignore_index") is not None
        if self.is_main_process and ignores and not self._overrides("batch_weight"):
            logger.warning("%s", unweighed(data))

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
        names = self._named_splits(splits, self.evaluate_splits, "evaluate")
        return {split: self.evaluate_epoch(split) for split in names}

    def _named_splits(self, splits: str | Sequence[str] | None, default: list[str], verb: str) -> list[str]:
        names = default if splits is None else [splits] if isinstance(splits, str) else list(splits)
        for split in names:
            self.check_split(split)
        check_named_once(names, f"the splits to {verb}")
        if not names:
            raise ValueError(
                f"Expected at least one split to {verb}. Received: datasets={sorted(self.datasets)}, "
                f"dataloaders={sorted(self.dataloaders)}. Put a dataset into `self.datasets`, or name the split."
            )
        return names

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
        totals, _ = self._evaluated(split, limit)
        return checked_figures("summarize", split, self.summarize(split, totals))

    def _evaluated(self, split: str, limit: int | None) -> tuple[Meters, bool]:
        """Return sums and weights of this rank, and whether `evaluate_step` gave a loss."""
        self.check_split(split)
        totals, own = Meters(), Meters(reserved=RESERVED_FIGURES)
        self.metric_set.reset()
        scored = False
        # What `evaluate_step` puts into `meters` belongs to this evaluation, not to the epoch that is open.
        training, self.meters = self.meters, own
        try:
            with self._evaluating(split, "evaluate"), torch.no_grad():
                for batch in self._paced(self.boundaries(split, islice(self._pass_over(split), limit))):
                    scored = self._evaluate_batch(batch, totals) or scored
        finally:
            self.meters = training
        totals.merge(own)
        return totals, scored

    def boundaries(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of an evaluation; training heeds requests between them."""
        return batches

    def _evaluate_batch(self, batch: Batch, totals: Meters) -> bool:
        data = self.to_device(batch.data)
        weight, samples = self._weigh(batch, data)
        undecided = self._observes_labels
        pred, loss = _as_pair(self.evaluate_step(data))
        if undecided and not self.label_shift.is_open:
            weight, samples = self._weigh(batch, data)
        if loss is not None and (isinstance(weight, Tensor) or weight):
            if self.sums_loss:
                totals.add_totals("loss", loss, weight)
            else:
                totals.update({"loss": loss}, weight)
        if self.metric_set and pred is not None:
            self.metric_set.update(prediction_of(pred), peek_target(data), samples)
        return loss is not None

    _tried: bool = False
    """Whether the evaluations were tried in this process; once is enough."""

    def _try_evaluations(self, splits: Sequence[str]) -> None:
        """Evaluate one batch of each split before the first update, so that an error in it comes before anything is trained.

        Streams, meters and buffers are left as they were. Left out are splits whose batches are given once, and evaluations of
        the user's own.
        """
        own = self._overrides("evaluate_steps" if self.is_step_mode else "evaluate_epoch") or self._overrides(
            "evaluate"
        )
        if self._tried or own or not self.config.try_evaluation:
            return
        self._tried = True
        for split in splits:
            if split in self.train_splits and split not in self.datasets:
                continue
            source = self._evaluation_source(split)
            if can_glance(source):
                with glanced(source.loader), preserved_tensors(self._written_by_forward()), self._own_place(source):
                    self._try_evaluation(split)

    def _written_by_forward(self) -> list[Tensor]:
        names = [canonical_name(name) for name, _ in self.unwrapped_model.named_buffers()]
        averaged = getattr(self.ema, "weights", {})
        own = [*self.unwrapped_model.buffers(), *self._criterion_tensors("buffers")]
        return own + [averaged[name] for name in names if name in averaged]

    @contextmanager
    def _own_place(self, source: BatchSource) -> Iterator[None]:
        """Read a loader of the user's from a place of its own: how its pass began is remembered with the place."""
        kept = self.sources.get(source.split)
        if source.kind != "position" and kept is source:
            self.sources[source.split] = self._source(source.split, source.loader)
        try:
            yield
        finally:
            if kept is not None:
                self.sources[source.split] = kept

    def _try_evaluation(self, split: str) -> None:
        totals, scored = self._evaluated(split, 1)
        try:
            figures = checked_figures("summarize", split, self.summarize(split, totals))
        except Exception as error:
            # Some figures are not defined on one batch. Where only some ranks fail, the others wait for them.
            if not all_arrive(f"tried/{split}", seconds=_PATIENCE_SECONDS):
                raise
            logger.warning(
                "Of one batch, the figures of split %r cannot be computed (%s: %s). Where those of the whole split can, all is well; "
                "else mend the metric or `summarize` now.",
                split,
                type(error).__name__,
                error,
            )
            return
        finally:
            self.metric_set.reset()
        board = self.scoreboard
        if board is None or board.split != split or self._scores_itself or (board.name == "loss" and scored):
            return
        board.check({split: figures})

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Run one batch forward, without gradients. Called on all ranks.

        Called alone, it is made as in an evaluation: on the bare model in evaluation mode, with averaged weights where there are any, and
        training's random streams are left as they were.

        Args:
            data: The batch; within an evaluation it is on the device.

        Returns:
            The prediction, and the loss as the criterion reduces it; `None` for a batch that has none.
        """
        inputs, target = unpack_batch(data, self.unwrapped_model)
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
        result, metrics = totals.averages(self.figures_domain), self.metric_set.compute(self.figures_domain)
        check_metrics(metrics, RESERVED_FIGURES)
        return result | metrics

    @contextmanager
    def _evaluating(self, split: str, mode: Literal["evaluate", "infer"]) -> Iterator[None]:
        """Evaluation mode on the bare model, with averaged weights where there are any and streams of its own."""
        seed = derive_seed(self.seed, mode, split, self.stream_place[0])
        wrapped, training, before = self.model, self.model.training, self.mode
        self.equalize_buffers()
        with ExitStack() as stack:
            stack.enter_context(self._collecting())
            stack.enter_context(preserved_random_state(self.device, seed=seed))
            if self.ema is not None:
                self._say_averaged()
                stack.enter_context(self.averaged_weights())
                # Averaged on each rank from buffers of its own, of which a checkpoint keeps rank 0's.
                self.equalize_buffers()
            # The wrapper's forward is a collective that a rank with fewer batches would miss.
            self.model = self.unwrap(wrapped)
            self.model.eval()
            self.mode = mode
            try:
                yield
            finally:
                self.mode = before
                self.model = wrapped
                self.model.train(training)

    _said_averaged: bool = False
    """Whether the log says which weights are evaluated; once is enough."""

    def _say_averaged(self) -> None:
        if self.is_main_process and not self._said_averaged:
            decay = getattr(self.ema, "decay", None)
            logger.info("Evaluating the averaged weights%s.", f" (decay {decay:g})" if decay is not None else "")
        self._said_averaged = True

    @property
    def evaluated_weights(self) -> str:
        """Which weights evaluation and inference use: `"averaged"` or `"trained"`."""
        return "trained" if self.ema is None else "averaged"

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return the context in which the model has its averaged weights; entered on all ranks."""
        applied: AbstractContextManager[None] = self.ema.applied()
        return applied

    def _pass_over(self, split: str) -> Iterator[Batch]:
        source = self._evaluation_source(split)
        source.rewind()
        yield from source.batches()
        source.rewind()

    def _evaluation_source(self, split: str) -> BatchSource:
        if split in self.train_splits:
            # A pass of its own, so that evaluating a training split does not move training's position.
            if split in self.datasets:
                return self._source(split, self.build_dataloader(split, self.datasets[split]))
            self._check_position(split)
            return self._source(split, self.dataloaders[split])
        return self.source(split)

    def _check_position(self, split: str) -> None:
        if self.source(split).consumed:
            raise ValueError(
                f"Expected a loader of its own to evaluate split {split!r} in the middle of training on it: its loader would lose "
                f"its place. Received: {type(self.dataloaders[split]).__name__} in `self.dataloaders`. Put a dataset into "
                "`self.datasets` instead, or a second loader under another split name."
            )

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
        named = [name for name in (*self.datasets, *self.dataloaders) if name.startswith(("infer", "predict"))]
        chosen = self._named_splits(split, named[:1] or self.evaluate_splits[:1], "infer")[0]
        if stream:
            return self._stream(chosen)
        mine = [_as_list(pred, samples) for pred, samples in self._predict(chosen)]
        ranks = self.data_domain.gather_objects(mine)
        rounds = max((len(batches) for batches in ranks), default=0)
        return [item for i in range(rounds) for batches in ranks if i < len(batches) for item in batches[i]]

    def _stream(self, split: str) -> Iterator[Any]:
        # The runner is as it was whenever the caller has the word: he may train, save, or never come back.
        for batch in self._pass_over(split):
            with self._evaluating(split, "infer"):
                pred, samples = self._predict_batch(batch)
            yield from _as_list(pred, samples)

    def _predict(self, split: str) -> Iterator[tuple[Any, int]]:
        with self._evaluating(split, "infer"):
            for batch in self._paced(self._pass_over(split)):
                yield self._predict_batch(batch)

    def _predict_batch(self, batch: Batch) -> tuple[Any, int]:
        data = self.to_device(batch.data)
        with torch.no_grad():
            pred = self.infer_step(data)
        return pred, count_samples(data) if batch.samples is None else batch.samples

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


def _as_pair(returned: Any) -> tuple[Any, Any]:
    """Refuse what is no prediction and loss."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    received = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"{type(returned).__name__}"
    raise ValueError(
        f"Expected `evaluate_step` to return the prediction and the loss, each of which may be None. Received: {received}. "
        "End it with `return pred, loss`."
    )


def checked_figures(hook: str, split: str, figures: Any) -> dict[str, float]:
    """Return what a hook gave for a split as floats: it goes into checkpoints and files, which hold nothing else.

    Args:
        hook: Name of the hook, for the message.
        split: The split.
        figures: What it returned.

    Raises:
        ValueError: If these are no figures by name.
    """
    if not isinstance(figures, Mapping):
        raise ValueError(
            f"Expected `{hook}` to return figures by name. Received: {figures!r} ({type(figures).__name__}) for split {split!r}. Return "
            f"those of super().{hook}(...), or a mapping such as {{'loss': 0.5}}."
        )
    return {str(name): as_number(f"{split}/{name}", value) for name, value in figures.items()}


def _as_list(pred: Any, samples: int) -> list[Any]:
    """Return the prediction of a batch sample by sample; see `TorchEvaluation.infer` for what can be taken apart."""
    if not samples:
        return []
    if not isinstance(pred, (Mapping, tuple)):
        pred = prediction_of(pred)
    if isinstance(pred, Tensor):
        rows = pred.detach().cpu()[:samples]
        single = rows.ndim == 1 or (rows.ndim == 2 and rows.shape[1] == 1)
        return rows.flatten().tolist() if single else list(rows.unbind(0))
    if isinstance(pred, Mapping):
        columns = {name: _as_list(value, samples) for name, value in pred.items() if _has_samples(value, samples)}
        return [dict(zip(columns, row)) for row in zip(*columns.values())] if columns else [pred]
    if isinstance(pred, tuple) and pred and all(_has_samples(part, samples) for part in pred):
        return list(zip(*(_as_list(part, samples) for part in pred)))
    return list(pred)[:samples] if isinstance(pred, list) else [pred]


def _has_samples(value: Any, samples: int) -> bool:
    return (
        isinstance(value, (Tensor, list))
        and (not isinstance(value, Tensor) or value.ndim > 0)
        and len(value) == samples
    )
