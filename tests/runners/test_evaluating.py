"""What a torch runner hands to its evaluator, without a runner: the bare model in a mode of its own, and training as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.held import Held
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from danling.data import build_dataloader
from danling.metrics import Meters, MetricSet
from danling.training import EMA
from danling.training.evaluator import Evaluator
from danling.training.forward import EvaluationForward

INPUTS = torch.arange(6.0)[:, None]


class Wrapper(nn.Module):
    """What a stack wraps a model in; its forward is for training only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("the wrapper's forward, which would be a collective")


class Evaluated(Held):
    """A model with a dropout in the wrapper of a stack, and a dataset to evaluate; what a step finds is written down."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.bare = nn.Sequential(nn.Dropout(0.5), self.model)
        self.model = Wrapper(self.bare)
        self.meters, self.broadcasts = Meters(), 0
        self.seen: list[tuple[Any, str, bool, bool]] = []
        self.drawn: list[float] = []
        self.datasets["val"] = TensorDataset(INPUTS, 3 * INPUTS)
        self.parts.metrics = MetricSet.wrap(None)
        self.evaluator: Evaluator = self.parts.evaluator

    @property
    def unwrapped_model(self) -> nn.Module:
        return self.bare

    def unwrap(self, model: Any) -> Any:
        return model.module if isinstance(model, Wrapper) else model

    def broadcast_buffers(self) -> None:
        self.broadcasts += 1

    def build_forward(self) -> EvaluationForward:
        return EvaluationForward(
            model=lambda: self.model,
            bare=lambda: self.bare,
            context=lambda: None,
            loss=lambda pred, target: (pred - target).abs().mean() if target is not None else None,
        )

    def _run_evaluate_step(self, step: Callable[[Any], Any], data: Any) -> Any:
        return step(data)

    def source(self, split: str) -> Any:
        return self.sources.of(split)

    def build_dataloaders(self) -> None:
        for split, dataset in self.datasets.items():
            self.dataloaders.setdefault(split, self.build_dataloader(split, dataset))

    def build_dataloader(self, split: str, dataset: Any) -> Any:
        settings = {"batch_size": 4, "drop_last": False, "shuffle": False}
        return build_dataloader(dataset, settings, split=split, train=False, seed=1, device=self.device)

    def batch_weight(self, data: Any, target: Any) -> float:
        return float(len(target))

    def evaluate_step(self, data: Any) -> Any:
        self.seen.append((self.model, self.mode, self.bare.training, torch.is_grad_enabled()))
        self.drawn.append(torch.rand(()).item())
        return self.evaluator.forward.evaluate(data)

    def infer_step(self, data: Any) -> Any:
        self.seen.append((self.model, self.mode, self.bare.training, torch.is_grad_enabled()))
        self.drawn.append(torch.rand(()).item())
        return self.evaluator.forward.infer(data)

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        return totals.averages()


def loss_at(weight: float) -> float:
    return ((weight - 3) * INPUTS).abs().mean().item()


def set_weight(run: Evaluated, weight: float) -> None:
    with torch.no_grad():
        run.bare[1].weight.fill_(weight)


def test_the_bare_model_is_evaluated_and_training_finds_everything_as_it_was(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    set_weight(run, 2.0)
    wrapper, drawn = run.model, torch.random.get_rng_state()
    assert run.evaluator.evaluate("val", None) == {"loss": pytest.approx(loss_at(2.0))}
    assert run.seen == [(run.bare, "evaluate", False, False)] * 2
    assert run.model is wrapper and run.mode == "train" and run.bare.training and run.broadcasts == 1
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_step_that_raises_leaves_training_as_it_was(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    wrapper, drawn = run.model, torch.random.get_rng_state()

    def fail(data: Any) -> Any:
        raise RuntimeError("out of order")

    run.evaluate_step = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of order"):
        run.evaluator.evaluate("val", None)
    assert run.model is wrapper and run.mode == "train" and run.bare.training
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_averaged_weights_are_evaluated_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Evaluated(tmp_path)
    set_weight(run, 2.0)
    run.ema = EMA(run.bare, decay=0.75)
    set_weight(run, 1.0)
    with caplog.at_level(logging.INFO, "danling"):
        for _ in range(2):
            assert run.evaluator.evaluate("val", None) == {"loss": pytest.approx(loss_at(2.0))}
    assert [record.message for record in caplog.records] == ["Evaluating the averaged weights (decay 0.75)."]
    # Its buffers are made the same on all ranks before and after the averaged ones are there.
    assert run.broadcasts == 4 and run.bare[1].weight.item() == 1.0


def test_what_is_drawn_belongs_to_the_split_and_the_mode(tmp_path: Path) -> None:
    def drawn(run: Evaluated, evaluate: Callable[..., object], *arguments: Any) -> list[float]:
        torch.rand(3)
        run.drawn.clear()
        evaluate(*arguments)
        return list(run.drawn)

    run = Evaluated(tmp_path)
    run.datasets["test"] = run.datasets["val"]
    first = drawn(run, run.evaluator.evaluate, "val", None)
    assert len(set(first)) == 2 and drawn(run, run.evaluator.evaluate, "val", None) == first
    assert drawn(run, run.evaluator.evaluate, "test", None) != first
    assert drawn(run, run.evaluator.infer, "val") != first
    run.seed = 2
    assert drawn(run, run.evaluator.evaluate, "val", None) != first


def test_predictions_are_made_in_a_mode_of_their_own(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    set_weight(run, 2.0)
    assert run.evaluator.infer("val") == [2.0 * number for number in range(6)]
    assert run.seen == [(run.bare, "infer", False, False)] * 2 and run.mode == "train"


def test_what_was_replaced_since_is_what_is_evaluated(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    run.summarize = lambda split, totals: {"of": float(len(split))}  # type: ignore[method-assign]
    run.meters = Meters()
    run.meters.update({"mine": 4.0})
    assert run.evaluator.evaluate("val", 1) == {"of": 3.0, "samples": 4.0} and len(run.seen) == 1
    assert run.meters.averages() == {"mine": 4.0}
    with pytest.raises(ValueError, match="nowhere"):
        run.evaluator.evaluate("nowhere", None)


def test_a_split_to_train_on_is_evaluated_in_a_pass_of_its_own(tmp_path: Path) -> None:
    run = Evaluated(tmp_path)
    run.datasets["train"] = run.datasets["val"]
    set_weight(run, 2.0)
    source = run.source("train")
    source.commit([batch for batch, _ in zip(source.batches(), range(1))])
    assert source.consumed == 4
    assert run.evaluator.evaluate("train", None) == {"loss": pytest.approx(loss_at(2.0))}
    assert run.source("train").consumed == 4
