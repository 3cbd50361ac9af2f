"""A micro-batch that weighs nothing adds exactly zero to an update, whatever its loss is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import danling as dl
from danling.distributed import Domain
from danling.training import NonFiniteError, Window

BATCH, UPDATES = 2, 3
CLASS_WEIGHTS = (1.0, 0.0, 2.0)


def data_of(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return points of which the first batch of each update weighs nothing: the loss of its mean is 0/0."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64).to(dtype)
    targets = 2 * torch.randint(2, (size,), generator=generator)
    for start in range(0, size, size // UPDATES):
        targets[start : start + BATCH] = 1
    return inputs, targets


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


class Tempered(nn.CrossEntropyLoss):
    """Trains a parameter of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.temperature = nn.Parameter(torch.ones((), dtype=weight.dtype))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input * self.temperature, target)


class Weighted(dl.Runner):
    def __init__(self, config: dict[str, Any], how: str, size: int, dtype: torch.dtype) -> None:
        super().__init__(config)
        weight = torch.tensor(CLASS_WEIGHTS, dtype=dtype)
        self.how, self.model = how, build(dtype)
        if self.config.stack_name() == "ddp":
            # A name of the parallel stack alone, which the program may use on others.
            self.pipeline = ["tokenize", "pad"]
        self.criterion = (Tempered if how == "criterion" else nn.CrossEntropyLoss)(weight)
        inputs, targets = data_of(size, dtype)
        self.datasets = {"train": [{"input": x, "target": y} for x, y in zip(inputs, targets)]}

    def train_step(self, data: Any) -> Any:
        if self.how not in ("own step", "parts"):
            return super().train_step((data["input"], data["target"]))
        with self.train_context():
            layers = self.model if self.how == "parts" else [self.model]
            pred = data["input"]
            for layer in layers:
                pred = layer(pred)
            counted = torch.tensor(CLASS_WEIGHTS, dtype=pred.dtype)[data["target"]]
            each = F.cross_entropy(pred, data["target"], reduction="none")
            loss = (each * counted).sum() / counted.sum()
            self.backward(loss)
        return pred, loss


def train(
    config: dict[str, Any], how: str, size: int, dtype: torch.dtype, stops: bool = False
) -> dict[str, Tensor]:
    for steps in (1, UPDATES) if stops else (UPDATES,):
        with Weighted({**config, "steps": steps}, how, size, dtype) as runner:
            runner.train()
            assert (
                runner.train_state.global_step == steps and runner.train_state.skipped_updates == 0
            )
            with runner.whole_weights():
                return_value = {
                    name: value.detach().clone() for name, value in runner.named_parameters()
                }
    return return_value


STACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "ddp, 2 ranks": (2, {}),
    "fsdp, 2 ranks": (2, {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}),
    "pipeline, 2 ranks": (2, {"stack": "parallel", "parallel": {"axes": {"pipeline": 2}}}),
    "accelerate, 2 ranks": (2, {"stack": "accelerate"}),
    "graph": (1, {"stack": "graph", "compile": {"backend": "eager"}}),
    "graph, 2 ranks": (2, {"stack": "graph", "compile": {"backend": "eager"}}),
    "deepspeed": (1, {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 1}}}),
}
CASES = [(stack, "plain", 2) for stack in STACKS if not stack.startswith("ddp")]
CASES += [("ddp", "criterion", 4), ("ddp, 2 ranks", "criterion", 2), ("ddp, 2 ranks", "plain", 4)]
CASES += [("ddp", "parts", 2), ("ddp, 2 ranks", "own step", 2), ("fsdp, 2 ranks", "own step", 2)]
FURTHER = [
    ("graph, 2 ranks", "plain", 2),
    ("ddp, 2 ranks", "plain", 4),
    ("fsdp, 2 ranks", "own step", 2),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stack", "how", "accum_steps"),
    [pytest.param(*case, marks=pytest.mark.slow if case in FURTHER else ()) for case in CASES],
)
def test_a_micro_batch_without_weight_adds_exactly_zero(
    tmp_path: Path, stack: str, how: str, accum_steps: int
) -> None:
    if stack == "deepspeed":
        pytest.importorskip("deepspeed")
    world_size, more = STACKS[stack]
    readers = 1 if stack.startswith("pipeline") else world_size
    dtype, tolerance = (torch.float32, 1e-5) if stack == "deepspeed" else (torch.float64, 1e-12)
    size = UPDATES * accum_steps * readers * BATCH
    config: dict[str, Any] = {
        "seed": 1,
        "log": False,
        "accum_steps": accum_steps,
        "dir": str(tmp_path),
        **more,
    }
    config |= {
        "dataloader": {"batch_size": BATCH, "shuffle": False},
        "optim": {"type": "sgd", "lr": 0.1},
    }
    config |= {"evaluate_interval": 100, "auto_resume": True}
    found = run_processes(
        train, config, how, size, dtype, stack == "ddp, 2 ranks", world_size=world_size
    )
    inputs, targets = data_of(size, dtype)
    model, weight = build(dtype), torch.tensor(CLASS_WEIGHTS, dtype=dtype)
    criterion = (Tempered if how == "criterion" else nn.CrossEntropyLoss)(weight)
    named = [
        *model.named_parameters(),
        *((f"criterion.{name}", p) for name, p in criterion.named_parameters()),
    ]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    for samples, labels in zip(inputs.split(size // UPDATES), targets.split(size // UPDATES)):
        optimizer.zero_grad()
        criterion(model(samples), labels).backward()  # the whole batch at once
        optimizer.step()
    for rank in found:
        for name, value in named:
            if name in rank:
                torch.testing.assert_close(rank[name], value.detach(), rtol=0, atol=tolerance)
    assert {name for rank in found for name in rank} == {name for name, _ in named}


def test_nan_weight_is_found_in_a_weightless_micro_batch(tmp_path: Path) -> None:
    """The row of an embedding that only the weightless micro-batch reads."""

    class Rows(dl.TorchRunner):
        def __init__(self) -> None:
            config = {
                "dir": str(tmp_path),
                "log": False,
                "steps": 1,
                "accum_steps": 2,
                "optim": {"type": "sgd", "lr": 0.1},
            }
            super().__init__(config | {"dataloader": {"batch_size": 2, "shuffle": False}})
            self.model = nn.Sequential(nn.Embedding(2, 4), nn.Linear(4, 3))
            with torch.no_grad():
                self.model[0].weight[1] = float("nan")
            self.criterion = nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHTS))
            self.datasets = {
                "train": [
                    (torch.tensor(i), torch.tensor(t)) for i, t in ((0, 0), (0, 2), (1, 1), (1, 1))
                ]
            }

    with (
        Rows() as runner,
        pytest.raises(
            NonFiniteError, match=r"gradients that are not finite for \['0.weight'|\['1.weight'"
        ),
    ):
        runner.train()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_a_window_cuts_the_gradient_of_the_output_alone(on_device: bool, weight: float) -> None:
    """With a weight that the host knows, and with one on a device, which is not waited for."""
    window = Window(Domain(), torch.device("cuda" if on_device else "cpu"))
    window.begin_microbatch(torch.tensor(weight, dtype=torch.float64) if on_device else weight, 3)
    model, targets = build(torch.float64), torch.tensor([1, 1, 1] if weight == 0.0 else [0, 0, 2])
    pred = model(torch.ones(3, 4, dtype=torch.float64))
    window.cut(pred)
    loss = F.cross_entropy(pred, targets, torch.tensor(CLASS_WEIGHTS, dtype=torch.float64))
    assert bool(loss.isnan()) == (weight == 0.0)
    window.scale(loss).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(bool(gradient.count_nonzero()) == (weight != 0.0) for gradient in gradients)
    assert not float(window.nonfinite)


WEIGHTS = torch.tensor(CLASS_WEIGHTS, dtype=torch.float64)
SMOOTHED = {
    "module": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1), True),
    "function": (partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.1), True),
    "sum": (nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1, reduction="sum"), False),
    "no smoothing": (nn.CrossEntropyLoss(WEIGHTS), False),
    "small weight": (nn.CrossEntropyLoss(WEIGHTS.clamp_min(1e-6), label_smoothing=0.1), False),
}


@pytest.mark.parametrize("name", SMOOTHED)
def test_smoothed_loss_of_classes_that_weigh_nothing_is_refused(name: str, tmp_path: Path) -> None:
    """It is infinite for a micro-batch of such classes, and the update so another one than that of the whole batch."""
    criterion, is_refused = SMOOTHED[name]

    class Smoothed(dl.Runner):
        def __init__(self) -> None:
            super().__init__(
                {
                    "dir": str(tmp_path),
                    "log": False,
                    "steps": 1,
                    "accum_steps": 3,
                    "optim": {"type": "sgd", "lr": 0.1},
                }
            )
            self.model, self.criterion = nn.Linear(4, 3, dtype=torch.float64), criterion
            self.datasets = {"train": TensorDataset(*data_of(18, torch.float64))}

    if is_refused:
        with pytest.raises(
            ValueError, match=r"Expected class weights above 0 with label_smoothing.*1e-6"
        ):
            Smoothed()
        return
    with Smoothed() as runner:
        runner.train()


def test_a_criterion_that_begins_to_smooth_is_refused_too(tmp_path: Path) -> None:
    class Smooths(dl.Runner):
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.model, self.criterion = (
                nn.Linear(4, 3, dtype=torch.float64),
                nn.CrossEntropyLoss(WEIGHTS),
            )
            self.datasets = {"train": TensorDataset(*data_of(18, torch.float64))}

        def on_pass_start(self, split: str) -> None:
            if self.config.smooths:
                self.criterion.label_smoothing = 0.1

    config = settings(tmp_path, epochs=1, smooths=True)
    with (
        Smooths(config) as runner,
        pytest.raises(ValueError, match="Expected class weights above 0 with label_smoothing"),
    ):
        runner.train()
    assert runner.train_state.global_step == 0
    with Smooths({**config, "smooths": False}) as runner:
        runner.criterion.label_smoothing = 0.1
        with pytest.raises(ValueError, match="Expected class weights above 0 with label_smoothing"):
            runner.train()


def test_nonfinite_loss_of_an_unknown_model_is_refused(tmp_path: Path) -> None:
    class Loose(dl.TorchRunner):
        def __init__(self) -> None:
            super().__init__(
                {
                    "dir": str(tmp_path),
                    "log": False,
                    "steps": 1,
                    "optim": {"type": "sgd", "lr": 0.1},
                }
            )
            self.model = nn.Linear(4, 3)
            self.datasets = {"train": [torch.ones(4)]}

        def batch_weight(self, data: Any, target: Any) -> float:
            return 0.0

        def train_step(self, data: Any) -> Any:
            self.backward(F.linear(data, self.model.weight).sum() * float("nan"))
            return None, None

    with (
        Loose() as runner,
        pytest.raises(
            ValueError, match=r"a finite loss of a micro-batch that weighs nothing.*loss=nan"
        ),
    ):
        runner.train()
