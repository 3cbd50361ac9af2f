"""G4 for models that compute their loss themselves: an update of micro-batches of keywords is that of the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.language import NextTokens, OwnTokens, TinyForCausalLM, TinyForMaskedLM, UntoldTokens, encode, sentences
from support.processes import run_processes
from support.toys import KeepsGradients
from torch import Tensor

import danling as dl

MODELS: dict[str, Any] = {"causal": TinyForCausalLM, "masked": TinyForMaskedLM, "next": NextTokens, "own": OwnTokens}


class LanguageRunner(KeepsGradients):
    """Without an override: the batch is what the model takes, the model returns its loss."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__(config)
        self.model = MODELS[kind]()
        self.datasets = {"train": sentences(32), "val": sentences(9)}
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


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


def updates(root: str, cases: list[tuple[str, int, int]]) -> list[dict[str, Any]]:
    return [one_update(root, *case) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_of_keywords_give_the_gradient_of_the_whole(world_size: int, tmp_path: Path) -> None:
    cases = [(kind, 32 // world_size // parts, parts) for kind in MODELS for parts in (1, 2, 8)]
    for rank in run_processes(updates, str(tmp_path), cases, world_size=world_size):
        for (kind, *_), found in zip(cases, rank, strict=True):
            model = MODELS[kind]()
            loss = model(**encode(sentences(32)))["loss"]
            loss.backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-12, atol=1e-15)
            assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                evaluated = float(model(**encode(sentences(9)))["loss"])
            assert found["val"] == pytest.approx(evaluated, rel=1e-12)


def test_a_divided_model_is_weighed_alike(tmp_path: Path) -> None:
    whole = one_update(str(tmp_path), "next", 32, 1)
    more: dict[str, Any] = {"stack": "parallel", "try_evaluation": False}
    for axis in ("replicate", "shard"):
        more["parallel"] = {"axes": {axis: 2}}
        for rank in run_processes(one_update, str(tmp_path), "next", 4, 4, more, world_size=2):
            for name, gradient in whole["gradients"].items():
                torch.testing.assert_close(rank["gradients"][name], gradient, rtol=1e-12, atol=1e-15)


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
    config = {"steps": 1, "seed": 0, "dir": str(root), "optim": {"type": "sgd", "lr": 1.0}, "accum_steps": accum_steps}
    config |= {"dataloader": {"batch_size": micro_batch, "collate_fn": encode, "shuffle": False}, "log": False}
    with runner_class(config, told) as runner:
        before = [parameter.detach().clone() for parameter in runner.model.parameters()]
        runner.train()
        return [old - new.detach() for old, new in zip(before, runner.unwrapped_model.parameters())]


@pytest.mark.parametrize(("runner_class", "told"), [(Untold, True), (UntoldAndWeighed, None), (NestedBatch, True)])
def test_what_is_declared_weighs_micro_batches(runner_class: Any, told: bool | None, tmp_path: Path) -> None:
    whole = first_gradient(runner_class, tmp_path / "whole", told, 16, 1)
    for micro_batch, accum_steps in ((4, 4), (2, 8)):
        parts = first_gradient(runner_class, tmp_path / str(accum_steps), told, micro_batch, accum_steps)
        for one, other in zip(whole, parts):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def refused(root: str, accum_steps: int) -> str:
    with pytest.raises(ValueError) as caught:
        first_gradient(Untold, Path(root), None, 4, accum_steps)
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "accum_steps"), [(1, 2), (2, 1)])
def test_labels_that_may_be_shifted_are_refused_where_the_weight_matters(
    world_size: int, accum_steps: int, tmp_path: Path
) -> None:
    for message in run_processes(refused, str(tmp_path), accum_steps, world_size=world_size):
        assert f"UntoldTokens, which does not say, with accum_steps={accum_steps} on {world_size} ranks" in message
        assert "`shifts_labels`" in message and "`batch_weight(data, target)`" in message


def test_where_the_weight_does_not_matter_nothing_need_be_said(tmp_path: Path) -> None:
    assert first_gradient(Untold, tmp_path, None, 16, 1)[0].abs().sum() > 0
