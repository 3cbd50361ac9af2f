"""Evaluation: sums over the batches of a split that leave no trace in training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.distributed import all_arrive
from danling.metrics import Meters, MetricSet, as_number
from danling.utils.protocols import ReductionDomain
from danling.utils.tensors import canonical_name

from .batches import not_one_loss, peek_target, prediction_of
from .safeguard import preserved_tensors

logger = logging.getLogger("danling")

BetweenBatches = Callable[[str, Iterator[Batch]], Iterator[Batch]]
"""What is done between the batches of a split: it yields them, and may end or leave the evaluation."""

_PATIENCE_SECONDS = 5.0
"""How long a rank that fails waits to hear whether all of them do."""


class EvaluationUnsupported(NotImplementedError):
    """The model cannot be run forward only, as by a pipeline schedule of the user's own that has no `eval`."""


class Evaluation:
    """What the evaluations of one run share: the mode in which they are made, and what watches their batches.

    Args:
        is_main: Whether this process says in the log which weights are evaluated.
    """

    def __init__(self, *, is_main: bool = True) -> None:
        self._is_main = is_main
        self._announced = False
        self._between: BetweenBatches | None = None

    @contextmanager
    def watched(self, between: BetweenBatches) -> Iterator[None]:
        """Evaluate inside with something done between the batches, such as listening to requests."""
        before, self._between = self._between, between
        try:
            yield
        finally:
            self._between = before

    def between(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of a split, watched where somebody watches."""
        return batches if self._between is None else self._between(split, batches)

    @contextmanager
    def mode(
        self,
        model: nn.Module,
        bare: nn.Module,
        *,
        equalize: Callable[[], None],
        averaged: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> Iterator[None]:
        """Put the bare model into evaluation mode, with averaged weights where there are any; on exit both are what they were.

        Args:
            model: The model as training has it, in the wrapper of its stack.
            bare: The model out of its wrapper, whose forward would be a collective that a rank with fewer batches misses.
            equalize: Makes the buffers the same on all ranks.
            averaged: Returns the context in which the model has its averaged weights.
        """
        was_training, modes = model.training, [(module, module.training) for module in model.modules()]
        equalize()
        with ExitStack() as stack:
            if averaged is not None:
                stack.enter_context(averaged())
                # Averaged on each rank from buffers of its own, of which a checkpoint keeps rank 0's.
                equalize()
            bare.eval()
            try:
                yield
            finally:
                model.train(was_training)
                for module, is_training in modes:
                    # Parts may have been in another mode than the whole.
                    module.training = is_training

    def announce_averaged(self, decay: float | None) -> None:
        """Say once in the log that the averaged weights are evaluated.

        Args:
            decay: Of the average; `None` where it has none.
        """
        if self._is_main and not self._announced:
            logger.info("Evaluating the averaged weights%s.", f" (decay {decay:g})" if decay is not None else "")
        self._announced = True


class EvaluationSums:
    """Sums and weights of the losses of one evaluation on this rank; metrics are updated beside them.

    Args:
        step: `(data) -> (prediction, loss)`, each of which may be `None`.
        weigh: `(batch, data) -> (weight, samples)` of a batch, its data on the device.
        to_device: Returns the data of a batch on the device.
        metrics: What is computed beside the loss; it is reset.
        sums_loss: Whether the loss is a sum over what its weight counts, instead of a mean.

    Attributes:
        totals: Sums and weights by figure.
        scored: Whether the step gave a loss.
        samples: Samples of this rank of which the step gave a loss or a prediction.
        metrics: As given.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        *,
        weigh: Callable[[Batch, Any], tuple[float | Tensor, float]],
        to_device: Callable[[Any], Any],
        metrics: MetricSet,
        sums_loss: bool = False,
    ) -> None:
        self.totals = Meters()
        self.scored = False
        self.samples = 0.0
        self._step = step
        self._weigh = weigh
        self._to_device = to_device
        self.metrics = metrics
        self._sums_loss = sums_loss
        metrics.reset()

    def add(self, batch: Batch) -> None:
        """Evaluate a batch and take in its loss and its prediction.

        Raises:
            ValueError: If the step returns no pair.
        """
        data = self._to_device(batch.data)
        weight, samples = self._weigh(batch, data)
        pred, loss = _as_pair(self._step(data))
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise not_one_loss(loss)
        if loss is not None and (isinstance(weight, Tensor) or weight):
            if self._sums_loss:
                self.totals.add_totals("loss", loss, weight)
            else:
                self.totals.update({"loss": loss}, weight)
        if self.metrics and pred is not None:
            self.metrics.update(prediction_of(pred), peek_target(data), samples)
        self.scored = self.scored or loss is not None
        self.samples += samples if pred is not None or loss is not None else 0

    def add_all(self, batches: Iterable[Batch]) -> None:
        """Evaluate batches without gradients."""
        with torch.no_grad():
            for batch in batches:
                self.add(batch)


def even_out(
    batches: Iterator[Batch], *, ranks: ReductionDomain, readers: ReductionDomain, reads: bool = True
) -> Iterator[Batch]:
    """Yield batches until no rank has one, equally many on all: a rank that ran out repeats its last one, which weighs nothing.

    Where a forward is a collective of the ranks that share parameters, all of them must make the same number.

    Args:
        batches: What this rank evaluates.
        ranks: The ranks that have to stay together.
        readers: The ranks that read different data; a rank that never had a batch is given one of theirs.
        reads: Whether this rank reads data; others go on with placeholders.
    """
    spare = None if reads else Batch(PLACEHOLDER, 0, 0)
    while True:
        batch = next(batches, None)
        is_real = batch is not None and batch.data is not PLACEHOLDER
        has_nothing = not is_real and spare is None
        flags = ranks.all_reduce(torch.tensor([float(is_real), float(has_nothing)], dtype=torch.float64))
        some_have, some_lack = flags.tolist()
        if not some_have:
            return
        if some_lack:
            offered = [found for found in readers.gather_objects(batch if is_real else None) if found is not None]
            spare = spare or (Batch(offered[0].data, 0, 0) if offered else None)
        if batch is not None and is_real:
            spare = Batch(batch.data, 0, 0)
        chosen = batch or spare
        assert chosen is not None
        yield chosen


@dataclass(frozen=True)
class Trial:
    """What one batch of a split came to before the first update.

    Attributes:
        figures: The metrics; `None` where they are not defined on one batch.
        scored: Whether the step gave a loss.
    """

    figures: dict[str, float] | None
    scored: bool


def try_one_batch(
    source: BatchSource,
    *,
    reopen: Callable[[Any], BatchSource],
    evaluate: Callable[[BatchSource], EvaluationSums],
    summarize: Callable[[Meters], dict[str, float]],
    written: Iterable[Tensor],
) -> Trial | None:
    """Evaluate the first batch of a split, so that an error in it comes before anything is trained; loader and buffers stay as they are.

    Some metrics need more than one batch, so an error of `summarize` is a warning where it comes on all ranks. Where only some ranks
    fail, the others wait for them, and it is raised.

    Args:
        source: The batches of the split.
        reopen: Returns another source over the same loader. How a pass began is remembered with the place in a loader of the user's, so
            its place in training is not moved.
        evaluate: Evaluates the first batch of a source.
        summarize: Returns the metrics of its sums.
        written: Tensors that a forward may write to.

    Returns:
        `None` where batches are given once, and none was read, or the model cannot be run forward only, which is said.
    """
    if not source.can_restart:
        return None
    with source.peek(), preserved_tensors(written):
        try:
            sums = evaluate(source if source.kind == "position" else reopen(source.loader))
        except EvaluationUnsupported as error:
            logger.warning("The evaluation of split %r was not tried: %s", source.split, error)
            return None
        try:
            return Trial(summarize(sums.totals), sums.scored)
        except Exception as error:
            if not all_arrive(f"tried/{source.split}", seconds=_PATIENCE_SECONDS):
                raise
            logger.warning(
                "Of one batch, the metrics of split %r cannot be computed (%s: %s). Where those of the whole split can, all is well; "
                "else mend the metric or `summarize` now.",
                source.split,
                type(error).__name__,
                error,
            )
            return Trial(None, sums.scored)
        finally:
            sums.metrics.reset()


def written_by_forward(
    model: nn.Module, others: Iterable[Tensor] = (), averaged: Mapping[str, Tensor] | None = None
) -> list[Tensor]:
    """Return the tensors that a forward may write to: the buffers of the model, and what is averaged of them.

    Args:
        model: The bare model.
        others: Buffers besides, such as those of a criterion.
        averaged: Averaged parameters and buffers of the model by canonical name.
    """
    names = [canonical_name(name) for name, _ in model.named_buffers()]
    return [*model.buffers(), *others, *((averaged or {})[name] for name in names if name in (averaged or {}))]


def checked_figures(hook: str, split: str, figures: object) -> dict[str, float]:
    """Return what a hook gave for a split as floats: it goes into checkpoints and files, which hold nothing else.

    Args:
        hook: Name of the hook, for the message.
        split: The split.
        figures: What it returned.

    Raises:
        ValueError: If these are no metrics by name.
    """
    if not isinstance(figures, Mapping):
        raise ValueError(
            f"Expected `{hook}` to return metrics by name. Received: {figures!r} ({type(figures).__name__}) for split {split!r}. Return "
            f"those of super().{hook}(...), or a mapping such as {{'loss': 0.5}}."
        )
    return {str(name): as_number(f"{split}/{name}", value) for name, value in figures.items()}


def _as_pair(returned: object) -> tuple[Any, Any]:
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    received = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"{type(returned).__name__}"
    raise ValueError(
        f"Expected `evaluate_step` to return the prediction and the loss, each of which may be None. Received: {received}. "
        "End it with `return pred, loss`."
    )
