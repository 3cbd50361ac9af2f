"""Evaluation and inference of splits without a runner: exact sums, predictions in order, training's place kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from support.keys import own_keys
from support.metrics import Largest
from support.weights import batch_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from danling.data import BatchSource
from danling.distributed import LocalDomain, Placement
from danling.metrics import Meters, MetricSet
from danling.training import Evaluation
from danling.training.evaluation import Trial
from danling.training.evaluator import EvaluatedRun, EvaluationSources, Evaluator
from danling.training.forward import EvaluationForward

CPU = torch.device("cpu")
INPUTS, TARGETS = torch.arange(10.0)[:, None], torch.arange(10.0)[:, None] * 3


class Doubling(nn.Module):
    """Returns twice its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * 2


class Run:
    """What an evaluator is constructed of, with everything that it enters written down."""

    def __init__(self, consumed: int = 0) -> None:
        dataset = TensorDataset(INPUTS, TARGETS)
        self.datasets: dict[str, Any] = {"val": dataset, "train": dataset}
        self.loaders = {name: DataLoader(dataset, batch_size=4) for name in ("val", "train", "train_given")}
        self.sources = {name: BatchSource(loader, split=name, seed=1) for name, loader in self.loaders.items()}
        self.built: list[str] = []
        self.entered: list[tuple[str, str]] = []
        self.meters, self.metrics = Meters(), MetricSet.wrap({"largest": Largest()})
        self.judged: dict[str, Trial] = {}
        self.summarized = lambda split, totals: totals.averages() | self.metrics.compute()
        domain, model = LocalDomain(), Doubling()
        forward = EvaluationForward(
            model=lambda: model,
            bare=lambda: model,
            context=lambda: None,
            loss=lambda pred, target: (pred - target).abs().mean() if target is not None else None,
        )
        self.infer_step = forward.infer
        run = EvaluatedRun(
            placement=Placement(data=domain, optimizer=domain, metrics=domain),
            keys=own_keys(),
            weights=batch_loss(),
            meters=lambda: self.meters,
            metrics=lambda: self.metrics,
            sums_loss=lambda: False,
            together=lambda: False,
            written=list,
        )
        places = EvaluationSources(
            check=self.check,
            trained=lambda: ["train", "train_given"],
            datasets=lambda: self.datasets,
            loaders=lambda: self.loaders,
            source=lambda split: self.sources[split],
            open=lambda split, loader: BatchSource(loader, split=split, seed=1),
            build=self.build,
        )
        self.evaluator = Evaluator(
            self,
            run=run,
            sources=places,
            evaluation=Evaluation(),
            forward=forward,
            entered=self.enter,
            paced=lambda batches: batches,
        )

    def check(self, split: str) -> None:
        if split not in self.loaders:
            raise ValueError(f"unknown {split}")

    def build(self, split: str, dataset: Any) -> Any:
        self.built.append(split)
        return DataLoader(dataset, batch_size=4)

    @contextmanager
    def enter(self, split: str, mode: str) -> Iterator[None]:
        self.entered.append((split, mode))
        with nullcontext():
            yield
        self.entered.append((split, "left"))

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        return self.summarized(split, totals)

    def to_device(self, data: Any) -> Any:
        return data

    def batch_weight(self, data: Any, target: Any) -> float:
        return float(len(target))

    def _run_evaluate_step(self, step: Any, data: Any) -> Any:
        return step(data)

    def evaluate_step(self, data: Any) -> Any:
        assert not torch.is_grad_enabled()
        self.meters.update({"seen": 1.0})
        return self.evaluator.forward.evaluate(data)


def test_every_sample_counts_once_and_meters_belong_to_the_evaluation() -> None:
    run = Run()
    run.meters.update({"mine": 4.0})
    found = run.evaluator.evaluate("val", None)
    assert found == {"loss": pytest.approx((TARGETS - 2 * INPUTS).mean().item()), "seen": 1.0, "largest": 18.0}
    assert run.meters.averages() == {"mine": 4.0} and run.entered == [("val", "evaluate"), ("val", "left")]
    # The first batches only, from the beginning again.
    assert run.evaluator.evaluate("val", 1) == {"loss": 1.5, "seen": 1.0, "largest": 6.0, "samples": 4.0}


def test_an_unknown_split_is_refused_before_anything_is_entered() -> None:
    run = Run()
    with pytest.raises(ValueError, match="unknown nothing"):
        run.evaluator.evaluate("nothing", None)
    assert run.entered == []


def test_a_split_that_is_trained_on_is_evaluated_in_a_pass_of_its_own() -> None:
    run = Run()
    source = run.sources["train"]
    source.commit([next(source.batches())])
    position = source.state_dict()
    assert run.evaluator.evaluate("train", None)["largest"] == 18.0
    assert source.state_dict() == position and run.built == ["train"]
    # A loader that the user gave can be read between passes only.
    assert run.evaluator.evaluate("train_given", 1)["largest"] == 6.0
    given = run.sources["train_given"]
    given.commit([next(given.batches())])
    with pytest.raises(ValueError, match="a loader of its own to evaluate split 'train_given'"):
        run.evaluator.evaluate("train_given", 1)


def test_predictions_come_in_the_order_of_the_dataset_at_once_or_one_by_one() -> None:
    run = Run()
    expected = (2 * INPUTS).flatten().tolist()
    assert run.evaluator.infer("val") == expected
    stream = run.evaluator.stream("val")
    assert next(stream) == 0.0
    assert run.entered[-1] == ("val", "left")  # whoever asks for the next one may train meanwhile
    assert [0.0, *stream] == expected


def test_each_split_is_tried_once_in_a_run_and_leaves_no_trace() -> None:
    run = Run()
    del run.datasets["train"]
    for _ in range(2):
        run.evaluator.try_once(["val", "train"], run.judged.__setitem__)
    assert run.judged.keys() == {"val"}  # the loader of training would lose its place
    assert run.judged["val"] == Trial({"loss": 1.5, "seen": 1.0, "largest": 6.0}, True)
    assert run.entered == [("val", "evaluate"), ("val", "left")]
    assert run.meters.averages() == {} and run.metrics.compute() == {}


def test_a_step_alone_runs_as_in_an_evaluation() -> None:
    run = Run()
    pred, loss = run.evaluator.alone("evaluate", run.evaluate_step, (INPUTS, TARGETS))
    assert torch.equal(pred, 2 * INPUTS) and float(loss) == pytest.approx(4.5)
    assert run.entered == [("", "evaluate"), ("", "left")]


def test_figures_that_are_none_are_refused_with_their_hook() -> None:
    run = Run()
    run.summarized = lambda split, totals: None  # type: ignore[assignment, return-value]
    with pytest.raises(ValueError, match="Expected `summarize` to return metrics by name"):
        run.evaluator.evaluate("val", None)
