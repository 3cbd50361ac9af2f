"""G4: any split of a batch over micro-batches and ranks gives the gradient of the whole, also if a model computes its loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.language import (
    NextTokens,
    OwnTokens,
    TinyForCausalLM,
    TinyForMaskedLM,
    UntoldTokens,
    encode,
    sentences,
)
from support.processes import run_processes
from support.toys import KeepsGradients, settings
from torch import Tensor, nn

import danling as dl

SPLITS = {
    1: [[12], [5, 4, 3], [1, 11]],
    2: [[7, 5], [3, 2, 4, 3]],
    3: [[6, 4, 2], [3, 1, 1, 2, 4, 1]],
}
"""Sizes of the micro-batches by world size; they go round the ranks, and none divides evenly."""


def points() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(12, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 4, (12, 3), generator=generator)
    # Ignored targets in very unequal shares, and one sample without a single one that counts.
    labels[torch.rand(12, 3, generator=generator) < 0.5] = -100
    labels[9] = -100
    return x, labels, torch.randn(12, 4, dtype=torch.float64, generator=generator)


def build() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12)).double()


def tokens_loss(criterion: nn.Module, pred: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = criterion(pred.reshape(len(pred), 4, 3), target)
    return loss


def criterion_of(kind: str) -> nn.Module:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    return {
        "plain": nn.CrossEntropyLoss(),
        "weighted": nn.CrossEntropyLoss(weight),
        "sum": nn.CrossEntropyLoss(reduction="sum"),
    }[kind]


class GradientRunner(KeepsGradients):
    def __init__(
        self, config: dict[str, Any], kind: str, batches: list[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(config)
        self.model = build()
        self.criterion = criterion_of(kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.dataloaders = {"train": batches}

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return tokens_loss(self.criterion, pred, target)


def one_update(root: str, kind: str, sizes: list[int], accum_steps: int) -> dict[str, Any]:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    x, labels, _ = points()
    parts = list(zip(x.split(sizes), labels.split(sizes)))
    config = {
        "steps": 1,
        "seed": 0,
        "accum_steps": accum_steps,
        "workspace_root": root,
        "log": False,
    }
    with GradientRunner(config, kind, parts[rank::world]) as runner:
        runner.train()
        return {
            "gradients": runner.gradients,
            "loss": runner.results[1]["train"]["loss"],
            "samples": runner.state.train.samples,
        }


@pytest.mark.parametrize("kind", ["plain", "weighted", "sum"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_any_split_gives_the_gradient_of_the_whole(
    world_size: int, kind: str, tmp_path: Path
) -> None:
    x, labels, _ = points()
    model = build()
    loss = tokens_loss(criterion_of(kind), model(x), labels)
    loss.backward()
    for sizes in SPLITS[world_size]:
        accum = len(sizes) // world_size
        ranks = run_processes(one_update, str(tmp_path), kind, sizes, accum, world_size=world_size)
        for rank in ranks:
            assert rank["samples"] == 12
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    rank["gradients"][name], parameter.grad, rtol=1e-6, atol=1e-12
                )
            if kind != "sum":
                assert rank["loss"] == pytest.approx(loss.item(), rel=1e-9)


MODELS: dict[str, Any] = {
    "causal": TinyForCausalLM,
    "masked": TinyForMaskedLM,
    "next": NextTokens,
    "own": OwnTokens,
}


class LanguageRunner(KeepsGradients):
    """Without an override: the batch is what the model takes, the model returns its loss."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config)
        self.model = MODELS[kind]()
        self.datasets = {"train": sentences(32), "val": sentences(9)}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


def update_of(
    root: str, kind: str, micro_batch: int, accum_steps: int, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "steps": 1,
        "seed": 0,
        "accum_steps": accum_steps,
        "workspace_root": root,
        "log": False,
    }
    config |= more or {}
    config["dataloader"] = {"batch_size": micro_batch, "shuffle": False, "collate_fn": encode}
    with LanguageRunner(config, kind) as runner:
        runner.train()
        return {
            "gradients": runner.gradients,
            "loss": runner.results[1]["train"]["loss"],
            "val": runner.evaluate("val")["val"]["loss"],
        }


def updates(root: str, cases: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [update_of(root, *case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_of_keywords_give_the_gradient_of_the_whole(
    world_size: int, tmp_path: Path
) -> None:
    cases = [(kind, 32 // world_size // parts, parts) for kind in MODELS for parts in (1, 2, 8)]
    for rank in run_processes(updates, str(tmp_path), cases, world_size=world_size):
        for (kind, *_), found in zip(cases, rank, strict=True):
            model = MODELS[kind]()
            loss = model(**encode(sentences(32)))["loss"]
            loss.backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(
                    found["gradients"][name], parameter.grad, rtol=1e-12, atol=1e-15
                )
            assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                evaluated = float(model(**encode(sentences(9)))["loss"])
            assert found["val"] == pytest.approx(evaluated, rel=1e-12)


def test_a_divided_model_is_weighed_alike(tmp_path: Path) -> None:
    whole = update_of(str(tmp_path), "next", 32, 1)
    more: dict[str, Any] = {"stack": "parallel", "try_evaluation": False}
    for axis in ("replicate", "shard"):
        more["parallel"] = {"axes": {axis: 2}}
        for rank in run_processes(update_of, str(tmp_path), "next", 4, 4, more, world_size=2):
            for name, gradient in whole["gradients"].items():
                torch.testing.assert_close(
                    rank["gradients"][name], gradient, rtol=1e-12, atol=1e-15
                )


class Untold(dl.TorchRunner):
    """A model that does not tell whether it shifts its labels; the runner may."""

    def __init__(self, config: dict[str, Any], told: bool | None = None) -> None:
        super().__init__(config)
        self.model = UntoldTokens()
        self.datasets = {"train": sentences(16), "val": sentences(5)}
        self.shifts_labels = told


class UntoldAndWeighed(Untold):
    def batch_weight(self, data: Any, target: Any) -> float:
        return float((target[:, 1:] != -100).sum())


class NestedBatch(Untold):
    def __init__(self, config: dict[str, Any], told: bool | None = None) -> None:
        super().__init__(config, told)
        self.config.dataloader.collate_fn = lambda rows: {"input": encode(rows)}


def first_gradient(
    runner_class: Any, root: Path, told: bool | None, micro_batch: int, accum_steps: int
) -> list[Tensor]:
    config = {
        "steps": 1,
        "seed": 0,
        "dir": str(root),
        "optim": {"type": "sgd", "lr": 1.0},
        "accum_steps": accum_steps,
    }
    config |= {
        "dataloader": {"batch_size": micro_batch, "collate_fn": encode, "shuffle": False},
        "log": False,
    }
    with runner_class(config, told) as runner:
        before = [parameter.detach().clone() for parameter in runner.model.parameters()]
        runner.train()
        return [old - new.detach() for old, new in zip(before, runner.unwrapped_model.parameters())]


@pytest.mark.parametrize(
    ("runner_class", "told"), [(Untold, True), (UntoldAndWeighed, None), (NestedBatch, True)]
)
def test_declared_weight_weighs_micro_batches(
    runner_class: Any, told: bool | None, tmp_path: Path
) -> None:
    whole = first_gradient(runner_class, tmp_path / "whole", told, 16, 1)
    for micro_batch, accum_steps in ((4, 4), (2, 8)):
        parts = first_gradient(
            runner_class, tmp_path / str(accum_steps), told, micro_batch, accum_steps
        )
        for one, other in zip(whole, parts):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def refused(root: str, accum_steps: int) -> str:
    with pytest.raises(ValueError) as caught:
        first_gradient(Untold, Path(root), None, 4, accum_steps)
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "accum_steps"), [(1, 2), (2, 1)])
def test_possibly_shifted_labels_are_refused_if_the_weight_matters(
    world_size: int, accum_steps: int, tmp_path: Path
) -> None:
    for message in run_processes(refused, str(tmp_path), accum_steps, world_size=world_size):
        assert (
            f"UntoldTokens, which does not say, with accum_steps={accum_steps} on {world_size} ranks"
            in message
        )
        assert "`shifts_labels`" in message and "`batch_weight(data, target)`" in message


def test_nothing_is_required_if_the_weight_does_not_matter(tmp_path: Path) -> None:
    assert first_gradient(Untold, tmp_path, None, 16, 1)[0].abs().sum() > 0


class OwnNames(dl.TorchRunner):
    """A mapping by names of the user's, and a criterion that leaves some targets out."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(2, 3), nn.CrossEntropyLoss()
        self.datasets = {
            "train": [{"points": torch.ones(2), "kinds": index % 3} for index in range(8)]
        }

    def train_step(self, data: Any) -> Any:
        loss = self.criterion(self.model(data["points"]), data["kinds"])
        self.backward(loss)
        return None, loss


class OwnWeights(OwnNames):
    def batch_weight(self, data: Any, target: Any) -> float:
        return float((data["kinds"] != -100).sum())


@pytest.mark.parametrize("runner_class", [OwnNames, OwnWeights])
def test_ignored_index_absent_from_the_targets_is_warned_of_once(
    runner_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runner_class(settings(tmp_path, epochs=2, dataloader={"batch_size": 2})) as runner:
        runner.train()
    said = [message for message in caplog.messages if "Expected a target in each batch" in message]
    assert len(said) == (runner_class is OwnNames)
    assert all("'kinds': int64" in message and "batch_weight" in message for message in said)
