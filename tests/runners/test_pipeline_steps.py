"""Steps of the user's own in a pipeline: one script on every stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.utils.tensors import whole


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens, under a name that no default step knows."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(1, 7, (count, 6), generator=generator)
        self.tokens[::3, 4:] = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index]}


class OwnSteps(dl.Runner):
    """A language model as people write one: the step shifts the tokens, calls the model once, then criterion and `backward`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Embedding(7, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 7)
        ).double()
        self.criterion = nn.CrossEntropyLoss(ignore_index=0)
        self.datasets = {"train": Sentences(20), "val": Sentences(7)}
        self.gradients: list[dict[str, Tensor]] = []
        self.after: list[int] = []
        self.seen: list[Tensor] = []

    def batch_weight(self, data: Any, target: Any) -> float:
        return float((data["tokens"][:, 1:] != 0).sum())

    def loss_of(self, data: Any) -> tuple[Tensor, Tensor]:
        tokens = self.prepare(data["tokens"])
        pred = self.model(tokens[:, :-1])
        self.after.append(len(pred))
        return pred, self.criterion(pred.flatten(0, 1), tokens[:, 1:].flatten())

    def prepare(self, tokens: Tensor) -> Tensor:
        return tokens

    def train_step(self, data: Any) -> tuple[Tensor, Tensor]:
        pred, loss = self.loss_of(data)
        self.backward(loss)
        self.meters.update({"logit": pred.detach().double().mean()}, weight=float(len(pred)))
        self.log_metric("own_loss", loss)
        self.log_metric("spread", pred.detach().std(), weight=len(pred))
        return pred, loss

    def evaluate_step(self, data: Any) -> tuple[Tensor, Tensor]:
        return self.loss_of(data)

    def optimizer_step(self) -> None:
        self.gradients.append(
            {
                name: whole(p.grad).clone()
                for name, p in self.named_parameters()
                if p.grad is not None
            }
        )
        super().optimizer_step()


class Extended(OwnSteps):
    """One that extends the default step, over a batch that the default reads."""

    def to_device(self, data: Any) -> Any:
        tokens = data["tokens"]
        return {"input": tokens[:, :-1], "target": tokens[:, 1:]}

    def batch_weight(self, data: Any, target: Any) -> float:
        return float((target != 0).sum())

    def compute_loss(self, pred: Any, target: Any) -> Tensor:
        loss: Tensor = self.criterion(pred.flatten(0, 1), target.flatten())
        return loss

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        pred, loss = (
            dl.TorchRunner.train_step(self, data)
            if self.stack == "ddp"
            else super(OwnSteps, self).train_step(data)
        )
        self.after.append(len(pred))
        self.meters.update({"logit": pred.detach().double().mean()}, weight=float(len(pred)))
        return pred, loss

    def evaluate_step(self, data: Any) -> tuple[Any, Any]:
        return super(OwnSteps, self).evaluate_step(data)


KINDS = {"own": OwnSteps, "extended": Extended}


def settings(root: Path, axes: Mapping[str, int], **parallel: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "workspace_root": str(root),
        "seed": 2,
        "epochs": 2,
        "accum_steps": 2,
        "log": False,
        "optim": {"type": "sgd", "lr": 0.1, "momentum": 0.9},
        "dataloader": {"batch_size": 4 // axes.get("replicate", 1)},
        "checkpoint": {"load_only": True},
        "max_grad_norm": 0.5,
    }
    return config | (
        {"stack": "parallel", "parallel": {"axes": dict(axes), **parallel}} if axes else {}
    )


def train(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    with KINDS[kind](config) as runner:
        results = runner.train()
        return {
            "results": {epoch: dict(split) for epoch, split in results.items()},
            "gradients": runner.gradients,
            "after": runner.after,
            "last": runner.stack == "ddp" or runner.stage_plan.has_last,
        }


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("kind", "axes", "schedule", "size"),
    [
        ("own", {"pipeline": 2}, "1F1B", 2),
        pytest.param("own", {"pipeline": 2}, "GPipe", 1, marks=pytest.mark.slow),
        pytest.param("own", {"pipeline": 2, "replicate": 2}, "1F1B", 1, marks=pytest.mark.slow),
        ("own", {"pipeline": 2, "replicate": 2}, "GPipe", 2),
        ("own", {"pipeline": 3}, "1F1B", 4),
        ("own", {"pipeline": 2}, "Interleaved1F1B", 1),
        ("extended", {"pipeline": 2}, "1F1B", 2),
    ],
)
def test_a_step_of_the_users_own_has_the_gradients_of_one_process(
    kind: str, axes: dict[str, int], schedule: str, size: int, tmp_path: Path
) -> None:
    (one,) = run_processes(train, settings(tmp_path / "one", {}), kind, world_size=1, timeout=90)
    config = settings(
        tmp_path / "mesh", axes, pipeline_schedule=schedule, pipeline_microbatch_size=size
    )
    ranks = run_processes(
        train, config, kind, world_size=axes["pipeline"] * axes.get("replicate", 1), timeout=90
    )
    assert len(one["gradients"]) == 6
    names: set[str] = set()
    for rank in ranks:
        for mine, theirs in zip(rank["gradients"], one["gradients"], strict=True):
            names |= mine.keys()
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-9)
        for epoch, splits in one["results"].items():
            for split, figures in splits.items():
                for name in {"loss", "logit", "own_loss"} & set(figures):
                    assert rank["results"][epoch][split][name] == pytest.approx(
                        figures[name], abs=1e-9
                    ), (split, name)
        assert bool(rank["after"]) == rank["last"], (
            "code behind the call of the model runs on the last stage alone"
        )
    assert names == one["gradients"][0].keys()
    assert "logit" in one["results"][1]["train"]
    assert kind != "own" or {"own_loss", "spread"} <= one["results"][1]["train"].keys()


class Noisy(OwnSteps):
    """One whose step draws what goes into the model."""

    def prepare(self, tokens: Tensor) -> Tensor:
        if self.mode == "train":
            tokens = tokens[torch.randperm(len(tokens))]
            self.seen.append(tokens)
        return tokens


def train_noisy(config: Mapping[str, Any]) -> list[Tensor]:
    with Noisy(config) as runner:
        runner.train()
        return runner.seen


@pytest.mark.timeout(120)
def test_the_first_and_the_last_stage_draw_the_same_in_a_step(tmp_path: Path) -> None:
    config = settings(
        tmp_path, {"pipeline": 2}, pipeline_schedule="1F1B", pipeline_microbatch_size=2
    )
    first, last = run_processes(train_noisy, config, world_size=2, timeout=90)
    assert len(first) == len(last) == 20 and all(map(torch.equal, first, last))


class Twice(OwnSteps):
    def train_step(self, data: Any) -> Any:
        tokens = data["tokens"]
        loss = self.criterion(
            (self.model(tokens) + self.model(tokens)).flatten(0, 1), tokens.flatten()
        )
        self.backward(loss)


class Unsent(OwnSteps):
    def train_step(self, data: Any) -> Any:
        self.loss_of(data)


class Reshaped(OwnSteps):
    def train_step(self, data: Any) -> Any:
        self.backward(self.model(data["tokens"].flatten()).mean())


class Uncalled(OwnSteps):
    def train_step(self, data: Any) -> Any:
        return None


class Evaluating(OwnSteps):
    def train_step(self, data: Any) -> Any:
        self.evaluate("val")
        return super().train_step(data)


class Saving(OwnSteps):
    """Saves on the last stage alone: the first one leaves the step at the call of the model."""

    def train_step(self, data: Any) -> Any:
        returned = super().train_step(data)
        self.save_checkpoint()
        return returned


def train_wrong(config: Mapping[str, Any], kind: type[OwnSteps]) -> None:
    with kind(config) as runner:
        runner.train()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Twice, "calls self.model once in a pipeline.*Received: 2 calls.*the model's `forward`"),
        (Unsent, r"`self.backward\(loss\)` once in a pipeline. Received: 0 calls"),
        (
            Reshaped,
            "4 samples in dimension 0, as the batch has. Received: shapes \\(24,\\).*`forward`",
        ),
        (
            Uncalled,
            "Expected a step that calls self.model in a pipeline. Received: one that returned without",
        ),
        (Evaluating, r"Expected evaluate\(\) to be called by all ranks.*in train_step.*Call it"),
        (Saving, r"Expected save_checkpoint\(\) to be called by all ranks.*in train_step"),
    ],
)
def test_step_impossible_in_a_pipeline_is_refused_with_the_rewrite(
    kind: Any, message: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, {"pipeline": 2}, pipeline_schedule="1F1B")
    outcomes = run_outcomes(train_wrong, config, kind, world_size=2, timeout=60)
    errors = [str(outcome.error) for outcome in outcomes]
    pattern = re.compile(message)
    assert any(pattern.search(error) for error in errors), errors
    if kind in (Reshaped, Uncalled, Evaluating):
        assert all(pattern.search(error) for error in errors), (
            "found on the first stage, and told to all"
        )
