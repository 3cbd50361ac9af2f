"""A user's stories with a torch runner on one process."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints import CheckpointMismatch


def points(length: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(length, 8, generator=generator)
    return x, x[:, :3].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


class Classifier(dl.TorchRunner):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        x, y = points()
        self.model = network()
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {
            "train": TensorDataset(x[:72], y[:72]),
            "val": TensorDataset(x[72:], y[72:]),
        }
        self.metrics = {"acc": dl.metrics.accuracy}


def settings(**changes: Any) -> dict[str, Any]:
    base = {
        "seed": 1,
        "dataloader": {"batch_size": 8},
        "optim": {"type": "adamw", "lr": 1e-2},
        "log": False,
    }
    return {**base, **({} if "steps" in changes else {"epochs": 2}), **changes}


@pytest.mark.parametrize("accum_steps", [1, 2, 3])
def test_equals_a_hand_written_loop_bitwise(accum_steps: int) -> None:
    x, y = points()
    batches = list(zip(x.split(8), y.split(8)))

    class Mine(dl.TorchRunner):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = network()
            self.criterion = nn.CrossEntropyLoss()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
            self.dataloaders = {"train": batches}

    with Mine(
        {"steps": 50, "seed": 0, "accum_steps": accum_steps, "max_grad_norm": 0.5, "log": False}
    ) as runner:
        runner.train()

    model = network()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    windows = [batches[i : i + accum_steps] for i in range(0, len(batches), accum_steps)]
    for step in range(50):
        window = windows[step % len(windows)]
        for inputs, target in window:
            criterion(model(inputs), target).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(1 / len(window))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, runner.model.parameters(), model.parameters()))


def test_epoch_mode_writes_its_results_to_disk() -> None:
    with Classifier(settings(epochs=3, scheduler={"type": "cosine"})) as runner:
        results = runner.train()
        directory = runner.dir
    assert list(results) == [1, 2, 3] and set(results[1]) == {"train", "val"}
    assert results[3]["train"]["loss"] < results[1]["train"]["loss"]
    assert runner.state.train.global_step == 27 and runner.state.train.samples == 216
    assert runner.best_score == min(result["val"]["loss"] for result in results.values())
    names = {path.name for path in (directory / "checkpoints").glob("*.pth")}
    assert names == {
        "latest.pth",
        "best.pth",
        "ckpt-e000001.pth",
        "ckpt-e000002.pth",
        "ckpt-e000003.pth",
    }
    assert json.loads((directory / "results.json").read_text())["3"] == results[3]
    assert {p.name for p in (directory / "metadata").iterdir()} >= {
        "config.full.yaml",
        "config.canonical.yaml",
        "config.diff.yaml",
    }
    assert yaml.safe_load((directory / "metadata" / "config.full.yaml").read_text())["epochs"] == 3
    payload = torch.load(directory / "checkpoints" / "latest.pth", weights_only=True)
    assert set(payload) >= {
        "format_version",
        "runner",
        "state",
        "model",
        "optimizer",
        "scheduler",
        "dataloaders",
    }
    assert list(payload["model"]) == list(network().state_dict())


def test_step_mode_evaluates_and_saves_at_its_intervals() -> None:
    with Classifier(
        settings(steps=20, evaluate_interval=6, **{"checkpoint.interval": 8})
    ) as runner:
        runner.train()
        names = {path.name for path in runner.workspace.checkpoints.glob("ckpt-*.pth")}
    assert list(runner.results) == [6, 12, 18, 20]
    assert names == {"ckpt-s000000000008.pth", "ckpt-s000000000016.pth"}
    assert runner.state.train.epoch == 2 and runner.is_step_mode


def test_train_twice_goes_on() -> None:
    with Classifier(settings(steps=5)) as runner:
        runner.train()
        runner.config.steps = 9
        runner.train()
    with Classifier(settings(steps=9)) as whole:
        whole.train()
    assert runner.state.train.global_step == 9
    assert all(map(torch.equal, runner.model.parameters(), whole.model.parameters()))


@pytest.mark.parametrize("kind", ["mapping", "tuple"])
def test_infer_takes_several_outputs_apart_by_sample(kind: str) -> None:
    class Several(Classifier):
        def infer_step(self, data: Any) -> Any:
            scores = super().infer_step(data)
            top = scores.argmax(-1)
            if kind == "tuple":
                return scores, top
            return {
                "scores": scores,
                "top": top,
                "words": [str(int(t)) for t in top],
                "loss": scores.mean(),
                "state": (scores,),
            }

    with Several({"epochs": 1, "seed": 1, "dataloader.batch_size": 7}) as runner:
        items = runner.infer("val")
        stream = list(runner.infer("val", stream=True))
        best = runner.model(points()[0][72:]).argmax(-1).tolist()
    assert len(items) == len(stream) == len(best)
    if kind == "mapping":
        assert all(sorted(item) == ["scores", "top", "words"] for item in items)
        assert [item["words"] for item in items] == [str(top) for top in best]
        items = [(item["scores"], item["top"]) for item in items]
    assert [top for _, top in items] == [int(scores.argmax()) for scores, _ in items] == best


def test_from_checkpoint_and_from_pretrained() -> None:
    with Classifier(settings()) as first:
        first.train()
        path = first.workspace.checkpoints / "latest.pth"
    with Classifier.from_checkpoint(path) as resumed:
        assert resumed.state.train.epoch == 2 and resumed.results == first.results
    with Classifier.from_pretrained(settings(lineage="tuned"), path) as tuned:
        assert tuned.state.train.epoch == 0
        assert all(map(torch.equal, tuned.model.parameters(), first.model.parameters()))
    for given in (
        first.model.state_dict(),
        {"model": first.model.state_dict()},
        torch.load(path, weights_only=True),
    ):
        with Classifier.from_pretrained(settings(lineage="given"), given) as tuned:
            assert tuned.state.train.epoch == 0
            assert torch.equal(tuned.model[0].weight, first.model[0].weight)
    with pytest.raises(CheckpointMismatch, match="state_dict of tensors"):
        Classifier.from_pretrained(settings(lineage="given"), {"model": {"weight": 1}})
    torch.save(first.model.state_dict(), "plain.pth")
    with Classifier(settings(pretrained="plain.pth", lineage="plain")) as plain:
        assert torch.equal(plain.model[0].weight, first.model[0].weight)


def _in_pairs(rows: list[Any]) -> Any:
    return torch.utils.data.default_collate(rows)


def _halved(step: int) -> float:
    return 0.5 ** (step // 9)


@pytest.mark.parametrize(
    ("key", "function"),
    [
        ("dataloader.collate_fn", _in_pairs),
        ("dataloader.worker_init_fn", id),
        ("scheduler.lr_lambda", _halved),
    ],
)
def test_from_checkpoint_asks_for_functions_of_which_a_checkpoint_has_the_names(
    key: str, function: Any
) -> None:
    given = dl.RunnerConfig(settings(scheduler={"type": "constant"}))
    if key.startswith("scheduler"):
        given.merge({"scheduler": {"type": "lambdalr"}, "scheduler.interval": "step"})
    given.merge({key: function})
    with Classifier(given) as whole:
        whole.train()
    given = given.clone()
    given.merge({"epochs": 1, "lineage": "first"})
    with Classifier(given) as first:
        first.train()
        path = first.workspace.checkpoints / "latest.pth"
    with pytest.raises(ValueError, match=f"Expected {key}.* to be a function.*from_checkpoint"):
        Classifier.from_checkpoint(path, {"epochs": 2})
    with Classifier.from_checkpoint(path, {"epochs": 2, key: function}) as resumed:
        resumed.train()
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns(precision: str) -> None:
    with Classifier(settings(epochs=6, precision=precision, max_grad_norm=1.0)) as runner:
        results = runner.train()
    assert results[6]["train"]["loss"] < 0.8 * results[1]["train"]["loss"]
    assert (runner.precision.scaler is not None) == (precision == "fp16")


def test_early_stop_and_best() -> None:
    class Worse(Classifier):
        def summarize(self, split: str, totals: Any) -> dict[str, float]:
            result = super().summarize(split, totals)
            return {**result, "score": [1.0, math.nan, 3.0, 2.0, 3.0, 9.0][self.state.train.epoch]}

    with Worse(settings(epochs=6, patience=2, score_name="score")) as runner:
        runner.train()
    assert (
        list(runner.results) == [1, 2, 3, 4, 5]
        and runner.best_index == 3
        and runner.best_score == 3.0
    )
    with Worse(settings(epochs=6, patience=2, score_name="score", auto_resume=True)) as again:
        again.train()
    assert list(again.results) == [1, 2, 3, 4, 5]


def test_export_at_the_end() -> None:
    with Classifier(
        settings(**{"checkpoint.last_save_model_only": True, "checkpoint.export_dtype": "bfloat16"})
    ) as runner:
        runner.train()
    payload = torch.load(runner.workspace.checkpoints / "model.pth", weights_only=True)
    assert payload["model"]["0.weight"].dtype is torch.bfloat16 and "optimizer" not in payload
    assert "optimizer" in torch.load(runner.workspace.checkpoints / "latest.pth", weights_only=True)


def test_the_callers_configuration_is_left_alone() -> None:
    config = dl.RunnerConfig(settings(seed=None))
    before = config.plain()
    with Classifier(config) as runner:
        runner.train()
    assert config.plain() == before and runner.config.seed is not None


def test_post_init_runs_once_after_the_outermost_init() -> None:
    calls = []

    class Base(Classifier):
        def __post_init__(self) -> None:
            calls.append(self.tag)
            super().__post_init__()

    class Outer(Base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.tag = "outer"

    Outer(settings()).close()
    assert calls == ["outer"]


def test_failing_construction_shows_the_users_error_and_leaves_nothing() -> None:
    class Broken(Classifier):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Broken(settings(log=True))
    assert not Path("experiments").exists()


def test_closing_twice_is_fine() -> None:
    runner = Classifier(settings())
    runner.train()
    runner.close()
    left = {path: path.stat().st_mtime_ns for path in Path("experiments").rglob("*")}
    assert left
    runner.close()
    assert {path: path.stat().st_mtime_ns for path in Path("experiments").rglob("*")} == left


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epochs": 4}, ["4 checkpoints"]),
        ({"steps": 6, "checkpoint": {"interval": 2}}, ["3 checkpoints"]),
        ({"epochs": 4, "checkpoint": {"keep_latest_k": 2}}, []),
        ({"epochs": 1}, []),
    ],
)
def test_first_save_names_the_expected_space_on_disk(
    changes: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "danling"), Classifier(settings(**changes)) as runner:
        runner.train()
        history = len(list(runner.workspace.checkpoints.glob("ckpt-*.pth")))
    lines = [text for text in caplog.messages if "will be kept in" in text]
    assert [" ".join(line.split()[:2]) for line in lines] == said
    assert all(
        line.startswith(f"{history} checkpoints with ") and "keep_latest_k=3 keeps three" in line
        for line in lines
    )


def test_notebooks_show_the_parts_of_a_runner_and_the_names_of_the_package() -> None:
    class Wide(Classifier):
        def __init__(self, config: Any, *, width: int = 3) -> None: ...

    assert list(inspect.signature(Wide).parameters) == ["config", "width"]
    assert list(inspect.signature(dl.Runner).parameters) == ["config"]
    offered = {name for name in dir(dl) if not name.startswith("_")}
    assert offered >= set(dl.__all__)
    assert not offered & {"TYPE_CHECKING", "annotations", "lazily"}
