"""Averaged weights in a run, on every stack that keeps them: beside a loop in float64, over a stop, and in what is evaluated."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import needs_deepspeed, zero
from support.toys import Small, differences, line_of, settings
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import danling as dl
from danling.checkpoints import CheckpointMismatch
from danling.training.run_state import StatePart
from danling.utils.tensors import canonical_name, whole

DECAY = 0.98
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Buffered(nn.Module):
    """Has buffers that must not be averaged: spectral norm's vectors, a mask with -inf, and one that each forward assigns anew."""

    def __init__(self, *, normed: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.Identity(), nn.Linear(8, 2)
        if normed:
            spectral_norm(self.first)
            self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        hidden = self.last(self.norm(self.first(x.to(self.last.weight.dtype))))
        return (hidden + self.mask).float().logsumexp(1, keepdim=True)


class Waves(nn.Module):
    """Has complex weights, and no others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.waves).abs().sum(1, keepdim=True)


def model_of(kind: str) -> nn.Module:
    """Return a model in a dtype, one of complex weights, or one for an engine, in which no layer norms in bfloat16."""
    if kind == "waves":
        return Waves()
    return Buffered(normed=False) if kind == "engine" else Buffered().to(DTYPES[kind])


class Averaged(dl.Runner):
    """Keeps the weights of each update, in float64 or complex128."""

    not_saved = ("past",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model = model_of(self.config.kind)
        self.criterion = nn.MSELoss()
        self.datasets = {"train": line_of(16), "val": line_of(6)}
        self.past = [self.wide(self.model.state_dict())]

    def step(self) -> Any:
        outcome = super().step()
        self.past.append(self.wide(self.model_state_dict()))
        return outcome

    def wide(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {
            canonical_name(name): whole(value).detach().clone() for name, value in weights.items()
        }
        return {
            name: value.to(torch.complex128 if value.is_complex() else torch.float64)
            for name, value in named.items()
        }


def train(config: dict[str, Any]) -> dict[str, Any]:
    with Averaged(config) as runner:
        runner.train()
        names = {canonical_name(name) for name, _ in runner.unwrapped_model.named_parameters()}
        return {
            "parameters": names,
            "past": runner.past,
            "averages": {name: whole(value).clone() for name, value in runner.ema.weights.items()},
            "loss": runner.evaluate("val")["val"]["loss"],
            "trained": runner.wide(runner.model_state_dict()),
        }


def train_in_parts(config: dict[str, Any], stop: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train to a stop, and go on from its checkpoint in another runner."""
    return train({**config, "steps": stop}), train({**config, "auto_resume": True})


def by_hand(
    past: list[dict[str, Tensor]], parameters: set[str], interval: int = 1
) -> dict[str, Tensor]:
    """Return the average of the parameters, and the last buffers."""
    expected = dict(past[0])
    for update, weights in enumerate(past[1:], 1):
        if update % interval == 0:
            mean = {
                name: DECAY * expected[name] + (1 - DECAY) * weights[name] for name in parameters
            }
            expected = {**weights, **mean}
    return expected


def loss_by_hand(kind: str, weights: Mapping[str, Tensor]) -> float:
    """Return the loss of a model of torch's that has these weights in its own dtype."""
    model = model_of(kind).eval()
    model.load_state_dict(dict(weights))
    inputs, targets = line_of(6).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), targets))


ONE: dict[str, Any] = {"stack": "ddp"}
SHARDED: dict[str, Any] = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
ENGINE: dict[str, Any] = {"stack": "deepspeed", "deepspeed": {**zero(3), "bf16": {"enabled": True}}}


@pytest.mark.parametrize(
    ("kind", "stack", "ranks", "interval"),
    [
        ("bfloat16", ONE, 1, 1),
        ("float16", ONE, 1, 3),
        ("float64", ONE, 1, 1),
        ("waves", ONE, 1, 1),
        ("bfloat16", ONE, 2, 1),
        ("bfloat16", SHARDED, 2, 1),
        ("bfloat16", {"stack": "accelerate"}, 1, 1),
        # make test trains averages on an engine in tests/guarantees/test_every_stack.py.
        pytest.param(
            "engine",
            ENGINE,
            2,
            1,
            marks=[needs_deepspeed, pytest.mark.slow, pytest.mark.timeout(200)],
        ),
    ],
    ids=[
        "bf16",
        "fp16",
        "float64",
        "complex",
        "bf16 on two ranks",
        "bf16 in shards",
        "accelerate",
        "bf16 in an engine",
    ],
)
def test_averages_are_those_of_a_loop_in_float64_over_a_stop(
    kind: str, stack: dict[str, Any], ranks: int, interval: int, tmp_path: Path
) -> None:
    averaging = {"ema": {"enabled": True, "decay": DECAY, "interval": interval}, "kind": kind}
    config = settings(
        tmp_path, steps=12, accum_steps=2, dataloader={"batch_size": 2}, **averaging, **stack
    )
    # The default of eps, 1e-8, is 0 in float16, and Adam then divides by 0.
    config["optim"] = {"type": "adamw", "lr": 0.01, "eps": 1e-4}
    found = (
        run_processes(train_in_parts, config, 5, world_size=ranks, timeout=150)
        if ranks > 1
        else [train_in_parts(config, 5)]
    )
    # An evaluation gives all ranks the buffers of the first.
    first, second = found[0]
    parameters, start = first["parameters"], first["past"][0]
    expected = by_hand([*first["past"], *second["past"][1:]], parameters, interval)
    # An engine averages weights in bfloat16, and tells those of its optimizer in float32.
    tolerance = {"float64": 1e-12, "engine": 2e-3}.get(kind, 1e-5)
    computed = 2e-2 if kind in ("bfloat16", "float16", "engine") else 1e-5
    dtype = {"float64": torch.float64, "waves": torch.complex64}.get(kind, torch.float32)
    for _, second in found:
        averages = second["averages"]
        assert averages.keys() == expected.keys() and {
            averages[name].dtype for name in parameters
        } == {dtype}
        for name, value in averages.items():
            close = tolerance if name in parameters else 0.0
            torch.testing.assert_close(
                value.to(expected[name].dtype), expected[name], rtol=close, atol=close / 10
            )
        assert second["loss"] == pytest.approx(loss_by_hand(kind, expected), rel=computed)
    assert max(float((expected[name] - start[name]).abs().max()) for name in parameters) > 1e-3, (
        "it has not moved"
    )


class Older(Averaged):
    """Keeps and saves averages as fae50579 did: in the dtype of the model, without a word on buffers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ema.weights = {name: value.bfloat16() for name, value in self.ema.weights.items()}

    def component_parts(self) -> list[Any]:
        parts = super().component_parts()
        older = StatePart(
            "ema",
            lambda: {"weights": dict(self.ema.weights), "num_updates": self.ema.num_updates},
            None,
        )
        return [older if part.name == "ema" else part for part in parts]


def resume_older(config: dict[str, Any]) -> dict[str, Any]:
    with Older({**config, "steps": 3}) as runner:
        runner.train()
        kept = runner.wide(runner.ema.weights)
    with Averaged({**config, "auto_resume": True}) as runner:
        begun = runner.wide(runner.ema.weights)
        runner.train()
        names = {canonical_name(name) for name, _ in runner.unwrapped_model.named_parameters()}
        averages = {name: whole(value).clone() for name, value in runner.ema.weights.items()}
        return {
            "kept": kept,
            "begun": begun,
            "past": runner.past,
            "averages": averages,
            "parameters": names,
        }


@pytest.mark.parametrize(
    ("stack", "ranks"),
    [(ONE, 1), pytest.param(SHARDED, 2, marks=pytest.mark.slow)],
    ids=["file", "sharded"],
)
def test_averages_of_an_older_checkpoint_are_float32_after_a_resume(
    stack: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    averaging = {"ema": {"enabled": True, "decay": DECAY}, "kind": "bfloat16"}
    config = settings(tmp_path, steps=6, dataloader={"batch_size": 2}, **averaging, **stack)
    found = (
        run_processes(resume_older, config, world_size=ranks)
        if ranks > 1
        else [resume_older(config)]
    )
    first = found[0]
    for name in first["parameters"]:
        assert torch.equal(first["begun"][name], first["kept"][name]), name
    expected = by_hand([first["begun"], *first["past"][1:]], first["parameters"])
    for each in found:
        for name in first["parameters"]:
            assert each["averages"][name].dtype == torch.float32
            torch.testing.assert_close(
                each["averages"][name].double(), expected[name], rtol=1e-5, atol=1e-6
            )
        assert torch.equal(each["averages"]["seen"].double(), expected["seen"])


@pytest.mark.parametrize(("named", "dtype"), [(None, torch.bfloat16), ("fp64", torch.float64)])
def test_last_save_of_weights_has_averages_in_the_dtype_of_the_model_or_the_given_one(
    named: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    saving = {"checkpoint": {"last_save_model_only": True, "export_dtype": named}}
    with Averaged(
        settings(tmp_path, steps=3, ema={"enabled": True}, kind="bfloat16", **saving)
    ) as runner:
        runner.train()
        kept = {name: value.clone() for name, value in runner.ema.weights.items()}
    stored = torch.load(tmp_path / "checkpoints" / "model.pth", weights_only=True)["ema"]["weights"]
    expected = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in kept.items()
    }
    assert differences(stored, expected) == []


class Headed(Small):
    """Its head has as many outputs as the program says, and maybe a bias."""

    def __init__(self, config: dict[str, Any], outputs: int, *, bias: bool) -> None:
        super().__init__(config)
        body, head = nn.Linear(4, 3), nn.Linear(3, outputs, bias=bias)
        self.model = nn.Sequential(OrderedDict(body=body, head=head))


@pytest.mark.parametrize(("outputs", "bias"), [(5, False), (2, True)], ids=["shape", "name"])
def test_error_about_a_new_part_names_the_entry_that_leaves_its_average_out(
    outputs: int, bias: bool, tmp_path: Path
) -> None:
    config = settings(tmp_path, steps=2, auto_resume=True, ema={"enabled": True, "decay": 0.5})
    with Headed(config, 2, bias=False) as first:
        first.train()
    excluded = ["optimizer", "model.head"]
    for _ in range(2):
        more = {"steps": 4, "checkpoint": {"exclude_from_loading": list(excluded)}}
        try:
            second = Headed({**config, **more}, outputs, bias=bias)
            break
        except CheckpointMismatch as error:
            (entry,) = re.findall("add '(.*)' to", str(error))
            excluded.append(entry)
    assert excluded[2:] == ["ema.weights.head"]
    with second:
        assert torch.equal(second.ema.weights["body.weight"], first.ema.weights["body.weight"])
        own = second.unwrapped_model.state_dict()
        assert torch.equal(second.ema.weights["head.weight"], own["head.weight"])
        second.train()
    assert second.state.train.global_step == 4
