"""How a torch runner evaluates: what of it an evaluation is handed, and the mode that it runs in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from danling.optim.modes import evaluation_weights
from danling.training import Evaluation, written_by_forward
from danling.training.evaluator import EvaluatedRun, EvaluationMode, EvaluationSources, Evaluator

if TYPE_CHECKING:
    from .assembly import TorchParts
    from .torch_runner import TorchRunner


def build_evaluator(runner: TorchRunner, parts: TorchParts) -> Evaluator:
    """Return what evaluates and predicts whole splits."""
    evaluation = Evaluation(is_main=runner.is_main_process)
    run = EvaluatedRun(
        placement=runner.placement,
        keys=runner._keys,
        weights=parts.loss,
        meters=lambda: runner.meters,
        metrics=lambda: parts.metrics,
        sums_loss=lambda: parts.sums_loss,
        together=lambda: runner.preparation.evaluates_together,
        written=lambda: written_by_forward(
            runner.unwrapped_model, parts.wrapping.criterion_tensors("buffers"), getattr(runner.ema, "weights", None)
        ),
    )
    sources = EvaluationSources(
        check=runner._data.splits.check,
        trained=lambda: runner.train_splits,
        datasets=lambda: runner.datasets,
        loaders=lambda: runner.dataloaders,
        source=lambda split: runner.source(split),
        open=lambda split, loader: runner.sources.open(split, loader),
        build=lambda split, dataset: runner.build_dataloader(split, dataset),
    )
    return Evaluator(
        runner,
        run=run,
        sources=sources,
        evaluation=evaluation,
        forward=runner.build_forward(),
        entered=partial(_evaluating, runner, evaluation),
        paced=runner._session.paced,
    )


@contextmanager
def _evaluating(runner: TorchRunner, evaluation: Evaluation, split: str, mode: EvaluationMode) -> Iterator[None]:
    """Evaluation mode on the bare model, with averaged weights where there are any."""
    preparation, bare, averages = runner.preparation, runner.unwrap(runner.model), runner.ema
    if averages is not None:
        evaluation.announce_averaged(getattr(averages, "decay", None))
    evaluating = evaluation.mode(
        runner.model,
        bare,
        equalize=runner.broadcast_buffers,
        averaged=partial(preparation.averaged, averages) if averages is not None else None,
    )
    modes, keys, session = evaluation_weights(runner.optimizer), runner._keys, runner._session
    observed = session.evaluating(split) if mode == "evaluate" and split else nullcontext()
    with observed, keys.evaluating(), preparation.evaluating(runner.model), session.collecting(), modes, evaluating:
        before = runner.model, runner.mode, runner.carry
        runner.model, runner.mode, runner.carry = bare, mode, None
        try:
            yield
        finally:
            runner.model, runner.mode, runner.carry = before
