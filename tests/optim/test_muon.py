"""`optim.type: muon`: which parameters are matrices, what an update computes on one process and on shards, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.gpt import GPT
from support.layouts import LENGTH, VOCABULARY, Sentences, run_layout
from support.processes import run_processes
from torch import Tensor, nn

import danling as dl
from danling.deepspeed.preparation import check_trainable
from danling.optim.matrices import matrices_of
from danling.optim.muon import ShardedMuon
from danling.optim.registry import build_optimizer

OPTIM = {
    "type": "muon",
    "lr": 0.05,
    "weight_decay": 0.1,
    "adamw": {"lr": 3e-3, "weight_decay": 0.2},
}


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = (
            nn.Linear(4, 4),
            nn.Linear(4, 4, bias=False),
            nn.LayerNorm(4),
        )
        self.bias_of_position = nn.Embedding(3, 4)


class Model(nn.Module):
    """An input, layers and a head; the layers are what the test makes of them."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.embedding, self.parts = nn.Embedding(5, 4), nn.ModuleDict({"h": layers})
        self.project, self.head = nn.Linear(4, 4), nn.Linear(4, 5)


def test_matrices_are_those_in_layers_of_a_list() -> None:
    model = Model(nn.ModuleList([Layer(), Layer()]))
    assert matrices_of(model, names(model)) == {
        f"parts.h.{layer}.{name}.weight" for layer in (0, 1) for name in ("first", "second")
    }
    gpt = GPT(VOCABULARY, context=LENGTH, width=16, depth=2, heads=4)
    found = matrices_of(gpt, names(gpt))
    assert found == {
        name for name, p in gpt.named_parameters() if p.ndim == 2 and name.startswith("blocks.")
    }


def test_a_tied_weight_is_an_embedding() -> None:
    layer = Layer()
    model = Model(nn.ModuleList([layer]))
    layer.first.weight = model.embedding.weight
    assert matrices_of(model, names(model)) == {"parts.h.0.second.weight"}


@pytest.mark.parametrize(
    ("layers", "received"),
    [
        (nn.Sequential(Layer(), Layer()), "parts.h.0.first.weight"),
        (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), "parts.h.0.weight"),
        (nn.Identity(), "project.weight"),
    ],
)
def test_ambiguous_matrix_is_refused_and_a_pattern_decides(
    layers: nn.Module, received: str
) -> None:
    model = Model(layers)
    with pytest.raises(
        ValueError, match=f"Received: optim.matrices=None, and {received}.* Set optim.matrices"
    ):
        matrices_of(model, names(model))
    expected = {
        name for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name
    }
    expected = {name for name in expected if "bias_of_position" not in name and "head" not in name}
    assert matrices_of(model, names(model), [r"^parts\.h\.|^project", "project"]) == expected
    with pytest.raises(ValueError, match=r"Received: 'norm|embedding'"):
        matrices_of(model, names(model), ["project", "norm|embedding"])


@pytest.mark.parametrize(
    ("optim", "more", "received"),
    [
        ({"type": "muon", "lr": 0.1}, {}, "optim.adamw.lr=None"),
        ({**OPTIM, "adamw": {"lr": 1e-3, "momentum": 0.9}}, {}, "'momentum'"),
        ({**OPTIM, "betas": (0.9, 0.99)}, {}, "'betas'"),
        ({**OPTIM, "nesterov": False}, {"dtype": "bfloat16"}, "optim.nesterov=False"),
    ],
)
def test_mismatched_options_are_refused(
    optim: dict[str, Any], more: dict[str, Any], received: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Received") as caught:
        run_layout(settings(tmp_path, optim=optim), more)
    assert received in str(caught.value)


def test_one_rate_serves_both_if_torch_matches_them(tmp_path: Path) -> None:
    model = GPT(VOCABULARY, context=LENGTH, width=16, depth=1, heads=4)

    class Matched(dl.Runner):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model, self.criterion, self.datasets = (
                model,
                nn.CrossEntropyLoss(),
                {"train": Sentences(4)},
            )

    optim = {"type": "muon", "lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
    with Matched(settings(tmp_path, optim=optim)) as runner:
        assert {group["lr"] for group in runner.optimizer.param_groups} == {1e-3}
        assert [type(member) for member in runner.optimizer.optimizers] == [
            ShardedMuon,
            torch.optim.AdamW,
        ]


def test_layout_without_whole_matrices_is_refused() -> None:
    model = Model(nn.ModuleList([Layer()]))
    device = torch.device("cpu")
    built = build_optimizer(OPTIM, model.named_parameters, model=model, device=device)
    check_trainable(model, None, built, 0)
    with pytest.raises(
        ValueError, match="ZeRO divides flat parameters. Received: ShardedMuon with .*stage=1"
    ):
        check_trainable(model, None, built, 1)
    whole = dict.fromkeys(names(model), True)
    with pytest.raises(ValueError, match="Received: parallel.axes.pipeline above 1"):
        build_optimizer(OPTIM, model.named_parameters, model=model, device=device, whole=whole)


def settings(root: Path, **more: Any) -> dict[str, Any]:
    base = {
        "dir": str(root),
        "seed": 2,
        "epochs": 2,
        "optim": OPTIM,
        "max_grad_norm": 0.7,
        "log": False,
    }
    return {
        **base,
        "dataloader": {"global_batch_size": 12, "micro_batch_size": 3, "drop_last": False},
        **more,
    }


def by_hand(gradients: list[dict[str, Tensor]], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights after updates with these gradients, by torch's own optimizers over whole tensors."""
    parameters = {name: nn.Parameter(value.clone()) for name, value in weights.items()}
    hidden = [p for name, p in parameters.items() if name.startswith("blocks.") and p.ndim == 2]
    others = [
        p for name, p in parameters.items() if not (name.startswith("blocks.") and p.ndim == 2)
    ]
    muon = torch.optim.Muon(hidden, lr=0.05, weight_decay=0.1)
    adamw = torch.optim.AdamW(others, lr=3e-3, weight_decay=0.2)
    for of_update in gradients:
        for name, parameter in parameters.items():
            parameter.grad = of_update[name].clone()
        nn.utils.clip_grad_norm_(parameters.values(), 0.7)
        muon.step()  # type: ignore[no-untyped-call]
        adamw.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def start(root: Path) -> dict[str, Tensor]:
    (rank,) = run_processes(
        run_layout,
        settings(root, epochs=1, optim={**OPTIM, "lr": 0.0, "adamw": {"lr": 0.0}}),
        world_size=1,
    )
    weights: dict[str, Tensor] = rank["weights"]
    return weights


SHARD = {"stack": "parallel", "parallel": {"axes": {"shard": -1}}}
HSDP = {"stack": "parallel", "parallel": {"axes": {"replicate": 2, "shard": 2}}}
CONTEXT = {"stack": "parallel", "parallel": {"axes": {"shard": 2, "context": 2}}}
TENSOR = {"stack": "parallel", "parallel": {"axes": {"shard": 2, "tensor": 2}}}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "stack"),
    [
        (1, {}),
        (2, {}),
        (3, SHARD),
        pytest.param(2, SHARD, marks=slow),
        pytest.param(4, HSDP, marks=slow),
        pytest.param(4, CONTEXT, marks=slow),
        pytest.param(4, TENSOR, marks=slow),
    ],
    ids=["one", "ddp", "shard-3", "shard-2", "hsdp", "context", "tensor"],
)
def test_every_layout_makes_the_update_of_torch_on_one_process(
    size: int, stack: dict[str, Any], tmp_path: Path
) -> None:
    """In float64, from the same weights; the gradients are those of one process, and the weights those of torch's Muon."""
    whole = run_processes(run_layout, settings(tmp_path / "whole"), world_size=1)[0]
    ranks = run_processes(run_layout, settings(tmp_path / "run", **stack), world_size=size)
    expected = by_hand(whole["gradients"], start(tmp_path / "start"))
    assert len(whole["gradients"]) >= 6
    for rank in ranks:
        for mine, theirs in zip(rank["gradients"], whole["gradients"], strict=True):
            for name in theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-11)
        for name, value in expected.items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=0, atol=1e-10)
