"""Evaluation and inference of a runner: the bare model in a mode of its own, exact metrics, and training as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from danling import TorchRunner
from danling.training import EMA

INPUTS = torch.arange(6.0)[:, None]


class Wrapper(nn.Module):
    """What a stack wraps a model in; its forward is for training only."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor) -> Tensor:
        raise AssertionError("the wrapper's forward, which would be a collective")


class Evaluated(TorchRunner):
    """A model with a dropout and a buffer in a wrapper, and datasets to evaluate; what a step finds is written down."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        loader = {"batch_size": 4, "drop_last": False, "shuffle": False}
        super().__init__(
            {
                "dir": directory,
                "log": False,
                "steps": 2,
                "seed": 1,
                "dataloader": loader,
                **settings,
            }
        )
        linear = nn.Linear(1, 1, bias=False)
        self.bare = nn.Sequential(nn.Dropout(0.5), linear)
        self.bare.register_buffer("calls", torch.zeros(()))
        self.model, self.criterion = self.bare, nn.L1Loss()
        self.optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1)
        self.datasets = {
            split: TensorDataset(INPUTS, 3 * INPUTS) for split in ("train", "val", "test")
        }
        self.seen: list[tuple[bool, str, bool, bool]] = []
        self.drawn: list[float] = []
        self.broadcasts = 0

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return Wrapper(model)

    def unwrap(self, model: Any) -> Any:
        return model.module if isinstance(model, Wrapper) else model

    def broadcast_buffers(self) -> None:
        self.broadcasts += 1

    def note(self) -> None:
        self.seen.append(
            (self.model is self.bare, self.mode, self.bare.training, torch.is_grad_enabled())
        )
        self.drawn.append(torch.rand(()).item())
        self.bare.calls += 1

    def evaluate_step(self, data: Any) -> Any:
        self.note()
        self.meters.update({"seen": 1.0})
        return super().evaluate_step(data)

    def infer_step(self, data: Any) -> Any:
        self.note()
        return super().infer_step(data)

    def set_weight(self, weight: float) -> None:
        with torch.no_grad():
            self.bare[1].weight.fill_(weight)


def loss_at(weight: float, inputs: Tensor = INPUTS) -> Any:
    return pytest.approx(((weight - 3) * inputs).abs().mean().item())


def test_the_bare_model_is_evaluated_once_a_sample_and_training_is_as_it_was(
    tmp_path: Path,
) -> None:
    with Evaluated(tmp_path) as run:
        run.set_weight(2.0)
        run.meters.update({"mine": 4.0})
        wrapper, drawn = run.model, torch.random.get_rng_state()
        assert run.evaluate_epoch("val") == {"loss": loss_at(2.0), "seen": 1.0}
        assert run.seen == [(True, "evaluate", False, False)] * 2
        assert run.model is wrapper and run.mode == "train" and run.bare.training
        assert torch.equal(torch.random.get_rng_state(), drawn)
        # The first batches only; what a step adds to `meters` belongs to the evaluation.
        assert run.evaluate_steps("val", 1) == {
            "loss": loss_at(2.0, INPUTS[:4]),
            "seen": 1.0,
            "samples": 4.0,
        }
        assert run.meters.averages() == {"mine": 4.0}
        # The loss may be a sum, and there may be none.
        run.criterion = nn.L1Loss(reduction="sum")
        assert run.evaluate_epoch("val")["loss"] == loss_at(2.0)
        run.evaluate_step = lambda data: (data[0], None)  # type: ignore[method-assign, assignment]
        assert run.evaluate_epoch("val") == {}
        run.summarize = lambda split, totals: {"of": float(len(split))}  # type: ignore[method-assign]
        assert run.evaluate_epoch("test") == {"of": 4.0}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (RuntimeError("out of order"), "out of order"),
        (None, "Expected `evaluate_step` to return the prediction and the loss"),
        (torch.ones(()), "Expected `evaluate_step` to return the prediction and the loss"),
        ((1, 2, 3), "Received: 3 values"),
        ((None, torch.ones(2)), "loss"),
    ],
)
def test_failing_step_leaves_training_unchanged(
    returned: Any, message: str, tmp_path: Path
) -> None:
    def step(data: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    with Evaluated(tmp_path) as run:
        wrapper, drawn = run.model, torch.random.get_rng_state()
        run.evaluate_step = step  # type: ignore[method-assign]
        with pytest.raises((RuntimeError, ValueError), match=message):
            run.evaluate_epoch("val")
        assert run.model is wrapper and run.mode == "train" and run.bare.training
        assert torch.equal(torch.random.get_rng_state(), drawn)


def test_averaged_weights_are_evaluated_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Evaluated(tmp_path) as run:
        run.set_weight(2.0)
        run.ema = EMA(run.bare, decay=0.75)
        run.set_weight(1.0)
        with caplog.at_level(logging.INFO, "danling"):
            for _ in range(2):
                assert run.evaluate_epoch("val")["loss"] == loss_at(2.0)
        assert [r.message for r in caplog.records] == [
            "Evaluating the averaged weights (decay 0.75)."
        ]
        # Its buffers are made the same on all ranks before and after the averaged ones are there.
        assert run.broadcasts == 4 and run.bare[1].weight.item() == 1.0


def test_draws_belong_to_the_split_and_the_verb(tmp_path: Path) -> None:
    with Evaluated(tmp_path) as run:

        def drawn(evaluate: Callable[[str], object], split: str) -> list[float]:
            torch.rand(3)
            run.drawn.clear()
            evaluate(split)
            return list(run.drawn)

        first = drawn(run.evaluate_epoch, "val")
        assert len(set(first)) == 2 and drawn(run.evaluate_epoch, "val") == first
        assert drawn(run.evaluate_epoch, "test") != first
        assert drawn(run.infer, "val") != first
        run.seed = 2
        assert drawn(run.evaluate_epoch, "val") != first


def test_a_split_to_train_on_is_evaluated_in_a_pass_of_its_own(tmp_path: Path) -> None:
    with Evaluated(tmp_path) as run:
        run.set_weight(2.0)
        source = run.source("train")
        source.commit([next(source.batches())])
        position = source.state_dict()
        assert run.evaluate_epoch("train")["loss"] == loss_at(2.0)
        assert source.state_dict() == position and source.consumed == 4
        # A loader that the user gave can be read between passes only.
        run.dataloaders["train_given"] = DataLoader(run.datasets["val"], batch_size=4)
        assert run.evaluate_steps("train_given", 1)["samples"] == 4.0
        given = run.source("train_given")
        given.commit([next(given.batches())])
        with pytest.raises(ValueError, match="a separate loader to evaluate split 'train_given'"):
            run.evaluate_epoch("train_given")


class Sampler:
    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return iter(range(6))

    def __len__(self) -> int:
        return 6

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


class Tried(Evaluated):
    """Fails in its first update, so that only the trial of the evaluations was made before."""

    def train_step(self, data: Any) -> Any:
        raise InterruptedError


def test_an_evaluation_is_tried_before_the_first_update_and_leaves_no_trace(
    tmp_path: Path, caplog: Any
) -> None:
    with Tried(tmp_path) as run:
        del run.datasets["test"]
        run.dataloaders["test"] = iter(
            [INPUTS]
        )  # can be read only once, so it is kept for the evaluation
        sampler = Sampler()
        run.dataloaders["val"] = DataLoader(run.datasets.pop("val"), batch_size=4, sampler=sampler)  # type: ignore[arg-type]

        def summarize(split: str, totals: Any) -> dict[str, float]:
            raise ZeroDivisionError("one class only")

        run.summarize = summarize  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(InterruptedError):
                run.train()
        assert run.seen == [] and sampler.passes == 0
        assert run.bare.calls.item() == 0 and run.meters.averages() == {}
        assert "ZeroDivisionError: one class only" in caplog.text
