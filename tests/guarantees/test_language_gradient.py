"""G4 for models that compute their loss themselves: an update of micro-batches of keywords is that of the whole batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.language import (
    NextTokens,
    OwnTokens,
    SmoothNextTokens,
    TinyForCausalLM,
    TinyForMaskedLM,
    ZeroNextTokens,
    encode,
    sentences,
)
from support.processes import run_processes
from torch import Tensor, nn

import danling as dl

MODELS: dict[str, Any] = {
    "causal": TinyForCausalLM,
    "masked": TinyForMaskedLM,
    "next": NextTokens,
    "zero": ZeroNextTokens,
    "own": OwnTokens,
}


class LanguageRunner(dl.Runner):
    """Without an override: the batch is what the model takes, the model returns its loss."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config)
        self.model = MODELS[kind]()
        self.datasets = {"train": sentences(32), "val": sentences(9)}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.gradients: dict[str, Tensor] = {}

    def optimizer_step(self) -> None:
        """Look at the gradients, then step."""
        self.gradients = {name: _whole(p.grad).clone() for name, p in self.unwrapped_model.named_parameters()}
        super().optimizer_step()


def _whole(gradient: Any) -> Tensor:
    whole: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


def one_update(
    root: str, kind: str, micro_batch: int, accum_steps: int, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    config: dict[str, Any] = {"steps": 1, "seed": 0, "accum_steps": accum_steps, "workspace_root": root, "log": False}
    config |= more or {}
    config["dataloader"] = {"batch_size": micro_batch, "shuffle": False, "collate_fn": encode}
    with LanguageRunner(config, kind) as runner:
        runner.train()
        return {
            "gradients": runner.gradients,
            "loss": runner.results[1]["train"]["loss"],
            "val": runner.evaluate("val")["val"]["loss"],
        }


def updates(root: str, kind: str, splits: list[tuple[int, int]], more: dict[str, Any]) -> list[dict[str, Any]]:
    return [one_update(root, kind, micro_batch, accum_steps, more) for micro_batch, accum_steps in splits]


# An evaluation that was tried before is the same thing on each rank: on two, `make test` shows one model only without it.
_CASES = [
    pytest.param(world, kind, tried, marks=() if world == 1 or tried or kind == "zero" else pytest.mark.slow)
    for world in (1, 2)
    for kind in MODELS
    for tried in (True, False)
]


@pytest.mark.parametrize(("world_size", "kind", "tried"), _CASES)
def test_micro_batches_of_keywords_give_the_gradient_of_the_whole(
    world_size: int, kind: str, tried: bool, tmp_path: Path
) -> None:
    model = MODELS[kind]()
    output = model(**encode(sentences(32)))
    output["loss"].backward()
    stepped = MODELS[kind]()
    with torch.no_grad():
        for parameter, counted in zip(stepped.parameters(), model.parameters()):
            assert counted.grad is not None
            parameter -= 0.1 * counted.grad
        evaluated = float(stepped(**encode(sentences(9)))["loss"])
    splits = [(32 // world_size, 1), (16 // world_size, 2), (4 // world_size, 8)]
    arguments = (str(tmp_path), kind, splits, {"try_evaluation": tried})
    for rank in run_processes(updates, *arguments, world_size=world_size):
        assert len(rank) == len(splits)
        for found in rank:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-12, atol=1e-15)
            assert found["loss"] == pytest.approx(float(output["loss"].detach()), rel=1e-12)
            assert found["val"] == pytest.approx(evaluated, rel=1e-12)


@pytest.mark.parametrize("kind", ["next", "zero"])
def test_a_divided_model_is_found_to_shift_as_well(kind: str, tmp_path: Path) -> None:
    whole = one_update(str(tmp_path), kind, 32, 1)
    more: dict[str, Any] = {"stack": "parallel", "try_evaluation": False}
    for axis in ("replicate", "shard"):
        more["parallel"] = {"axes": {axis: 2}}
        for rank in run_processes(one_update, str(tmp_path), kind, 4, 4, more, world_size=2):
            for name, gradient in whole["gradients"].items():
                torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-12, atol=1e-15)


class Smooth(dl.TorchRunner):
    """A model with a loss that is no mean cross-entropy."""

    model_class: Any = SmoothNextTokens

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = self.model_class()
        self.datasets = {"train": sentences(16), "val": sentences(5)}


class SmoothAndWeighed(Smooth):
    """Says what its loss is averaged over."""

    def batch_weight(self, data: Any, target: Any) -> float:
        """Count what counts."""
        return float((target[:, 1:] != -100).sum())


class StepsItself(Smooth):
    """Takes the loss of its model without asking for it."""

    model_class = NextTokens

    def train_step(self, data: Any) -> Any:
        """Hand the loss on."""
        pred = self.model(**data)
        self.backward(pred["loss"])
        return pred, pred["loss"]


@pytest.mark.parametrize(
    ("runner_class", "tried", "said"),
    [
        (Smooth, True, "Received: loss="),
        (Smooth, False, "Received: loss="),
        (SmoothAndWeighed, True, None),
        (StepsItself, True, None),
        (StepsItself, False, "only after its backward"),
    ],
)
def test_a_loss_that_cannot_be_weighed_by_itself_is_warned_of_once(
    runner_class: Any, tried: bool, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"epochs": 2, "workspace_root": str(tmp_path), "optim": {"type": "sgd"}, "try_evaluation": tried}
    config["dataloader"] = {"batch_size": 4, "collate_fn": encode}
    with caplog.at_level(logging.WARNING, logger="danling"), runner_class(config) as runner:
        runner.train()
    found = [
        record.message for record in caplog.records if "Expected the loss that the model returns" in record.message
    ]
    assert len(found) == (said is not None)
    assert all(str(said) in message and "`shifts_labels`" in message for message in found)


@pytest.mark.parametrize("kind", ["next", "zero"])
@pytest.mark.parametrize("stopped", [1, 3])
def test_a_run_that_goes_on_finds_it_out_anew_and_is_the_same(kind: str, stopped: int, tmp_path: Path) -> None:
    def run(name: str, **more: Any) -> dict[str, Tensor]:
        config: dict[str, Any] = {"seed": 0, "accum_steps": 3, "dir": str(tmp_path / name), "try_evaluation": False}
        config["dataloader"] = {"batch_size": 2, "collate_fn": encode}
        with LanguageRunner({**config, **more, "log": False}, kind) as runner:
            runner.train()
            return {name: p.detach().clone() for name, p in runner.unwrapped_model.named_parameters()}

    whole = run("whole", steps=6)
    run("parts", steps=stopped)
    rest = run("parts", steps=6, auto_resume=True)
    assert all(torch.equal(rest[name], value) for name, value in whole.items())


class OwnNames(dl.TorchRunner):
    """A mapping by names of the user's, and a criterion that leaves some targets out."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 3)
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": [{"points": torch.ones(2), "kinds": index % 3} for index in range(8)]}

    def train_step(self, data: Any) -> Any:
        """Read the batch by its own names."""
        pred = self.model(data["points"])
        loss = self.criterion(pred, data["kinds"])
        self.backward(loss)
        return pred, loss


class OwnWeights(OwnNames):
    """Weighs its batches itself."""

    def batch_weight(self, data: Any, target: Any) -> float:
        """Count what counts."""
        return float((data["kinds"] != -100).sum())


@pytest.mark.parametrize("runner_class", [OwnNames, OwnWeights])
def test_a_criterion_that_ignores_targets_and_finds_none_is_warned_of_once(
    runner_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"epochs": 2, "workspace_root": str(tmp_path), "dataloader": {"batch_size": 2}, "optim": {"type": "sgd"}}
    with caplog.at_level(logging.WARNING, logger="danling"), runner_class(config) as runner:
        runner.train()
    said = [record.message for record in caplog.records if "Expected a target in each batch" in record.message]
    assert len(said) == (runner_class is OwnNames)
    assert all("['kinds', 'points']" in message and "batch_weight" in message for message in said)


class Scored(dl.TorchRunner):
    """A model that returns loss and logits, under a criterion and metrics of the user's."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model = TinyForCausalLM(double=False)
        self.criterion = lambda logits, labels: nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.metrics = {"acc": lambda logits, labels: (logits.argmax(-1) == labels).float().mean(1)}
        self.datasets = {"train": sentences(8), "val": sentences(5)}


def test_a_criterion_and_metrics_are_handed_the_logits(tmp_path: Path) -> None:
    config = {"epochs": 1, "workspace_root": str(tmp_path), "optim": {"type": "sgd"}}
    config["dataloader"] = {"batch_size": 4, "collate_fn": encode}
    with Scored(config) as runner:
        figures = runner.train()[1]
        assert set(figures["val"]) == {"loss", "acc"}
        predictions = runner.infer("val")
    assert len(predictions) == 5
    assert predictions[0]["logits"].shape == (7, 11)
