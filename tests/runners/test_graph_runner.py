"""The graph stack: what it trains is what `ddp` trains, and what cannot become one graph is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import whole_settings
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = input + layer(input)
        output: Tensor = self.head(self.norm(input))
        return output


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


BUILDS: dict[str, Callable[[], nn.Module]] = {"sequential": sequential, "own": Own}


class Toy(dl.Runner):
    not_saved = ("losses_seen",)

    def __init__(self, config: Any, build: str = "sequential") -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        inputs, labels = (
            torch.randn(22, 6, generator=generator),
            torch.randint(3, (22,), generator=generator),
        )
        labels[::5] = -100
        self.datasets = {
            "train": TensorDataset(inputs, labels),
            "val": TensorDataset(inputs[:7], labels[:7]),
        }
        self.model = BUILDS[build]()
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy}
        self.losses_seen: list[float] = []

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        pred, loss = super().train_step(data)
        assert pred.shape == (len(data[0]), 3)
        self.losses_seen.append(float(loss.detach()))
        return pred, loss


def config(root: Path, stack: str = "graph", **changes: Any) -> dict[str, Any]:
    loader = {"batch_size": 4, "drop_last": False}
    base = {
        "stack": stack,
        "epochs": 2,
        "log": False,
        "max_grad_norm": 0.5,
        "dataloader": loader,
        "scheduler": {},
    }
    settings = whole_settings("unused", **{**base, "dir": str(root), **changes})
    if stack == "graph":
        settings["compile"] = {"backend": "aot_eager", **changes.get("compile", {})}
    return settings


def outcome(
    settings: dict[str, Any], build: str = "sequential", runner_class: type[Toy] = Toy
) -> dict[str, Any]:
    with runner_class(settings, build) as runner:
        runner.train()
        return {
            "model": {name: tensor.clone() for name, tensor in runner.model_state_dict().items()},
            "ema": {}
            if runner.ema is None
            else {name: t.clone() for name, t in runner.ema.weights.items()},
            "losses": runner.losses_seen,
            "results": runner.results,
            "predictions": torch.stack(runner.infer("val")),
            "graphs": 0 if runner.compilation is None else runner.compilation.graphs,
        }


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    for part in ("model", "ema"):
        assert list(found[part]) == list(expected[part])
        for name, tensor in found[part].items():
            torch.testing.assert_close(tensor, expected[part][name], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        found["predictions"], expected["predictions"], rtol=tolerance, atol=tolerance
    )
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize(("build", "policy"), [("sequential", "default"), ("own", "recompute")])
def test_one_graph_for_each_size_and_the_same_run_as_ddp(
    build: str, policy: str, tmp_path: Path
) -> None:
    expected = outcome(config(tmp_path / "ddp", "ddp"), build)
    found = outcome(config(tmp_path / "graph", compile={"memory_policy": policy}), build)
    # Batches of four, and the last one of two.
    assert found["graphs"] == 2
    assert_same(found, expected)
    assert found["results"] == expected["results"]


def test_autocast_equals_the_one_of_the_forward(tmp_path: Path) -> None:
    expected = outcome(config(tmp_path / "ddp", "ddp", precision="bf16"))
    found = outcome(config(tmp_path / "graph", precision="bf16"))
    assert found["losses"][0] == expected["losses"][0]
    # Compiled, the backward of dropout rounds otherwise.
    assert_same(found, expected, tolerance=0.02)
    assert outcome(config(tmp_path / "fp32"))["losses"][0] != found["losses"][0]


def test_another_compilation_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int, stack: str, **compile: Any) -> list[str]:
        caplog.clear()
        settings = config(
            tmp_path, stack, epochs=None, steps=steps, auto_resume=steps > 1, compile=compile
        )
        with Toy(settings) as runner:
            runner.train()
        return [
            r.getMessage() for r in caplog.records if "differently compiled code" in r.getMessage()
        ]

    assert train(1, "graph") == []
    (said,) = train(2, "graph", memory_policy="recompute")
    assert "compile.memory_policy: stored None, now 'recompute'" in said
    assert (
        train(3, "graph", memory_policy="recompute", precompile_artifact_dir=str(tmp_path / "code"))
        == []
    )
    (said,) = train(4, "ddp", enable=True, backend="aot_eager")
    assert "stack: stored 'graph', now absent" in said
    (said,) = train(5, "ddp", enable=False)
    assert "compile.enable: stored True, now False" in said
    assert train(6, "ddp", enable=False) == []


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


class Tokens(dl.Runner):
    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(11, (10, 5), generator=generator)
        labels = ids.clone()
        labels[::2, 2:] = -100
        samples = [{"input_ids": i, "labels": j} for i, j in zip(ids, labels)]
        self.datasets = {"train": samples, "val": samples[:3]}
        self.model = OwnLoss()


def test_model_with_its_own_loss_trains_as_on_ddp(tmp_path: Path) -> None:
    weights, results = [], []
    for stack in ("ddp", "graph"):
        with Tokens(config(tmp_path / stack, stack, accum_steps=1)) as runner:
            runner.train()
            weights.append(runner.model_state_dict())
            results.append(runner.results)
    assert results[0] == results[1]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


class Apart(Toy):
    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        pred = self.model(data[0])
        loss = self.compute_loss(pred, data[1])
        self.backward(loss)
        return pred, loss


class Wrapping(Toy):
    def wrap_model(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)


def test_a_step_of_ones_own_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"a `train_step` that calls super\(\)\.train_step\(data\)"),
        Apart(config(tmp_path)) as run,
    ):
        run.train()


class Bare(Toy):
    def materialize_model(self) -> None:
        pass


def test_empty_hooks_leave_a_training_run(tmp_path: Path) -> None:
    found = outcome(config(tmp_path, ema={}), runner_class=Bare)
    assert found["graphs"] == 2 and len(found["losses"]) == 12


def wrap_by_hand(settings: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        Wrapping(settings)
    return str(caught.value)


def test_a_wrapper_of_ones_own_is_refused(tmp_path: Path) -> None:
    for said in run_processes(wrap_by_hand, config(tmp_path), world_size=2):
        assert "`ddp_kwargs`" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"fsdp": {"enabled": True}}, "stack='parallel'"), ({"ft": {"enabled": True}}, "ft.enabled")],
)
def test_impossible_settings_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        Toy(config(tmp_path, **changes))


def test_graph_break_is_named(tmp_path: Path) -> None:
    class Breaking(Toy):
        def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().compute_loss(pred, target)

    with (
        Breaking(config(tmp_path / "whole")) as runner,
        pytest.raises(RuntimeError, match="fullgraph=false"),
    ):
        runner.train()
    with Breaking(config(tmp_path / "parts", compile={"fullgraph": False})) as runner:
        runner.train()
        assert runner.state.train.global_step == 6
