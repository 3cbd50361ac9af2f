"""Optimizers by name, and parameter groups by regular expression."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.toys import Small, settings
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.optim import OPTIMIZERS, build_param_groups
from danling.optim.muon import ShardedMuon
from danling.optim.registry import build_optimizer

_CLASSES = {
    name: cls
    for name, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}


def _descend(optimizer: Any, weight: nn.Parameter, embedding: nn.Embedding | None = None) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight if embedding is None else embedding(torch.tensor([0, 1]))).square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)


@pytest.mark.parametrize("name", _CLASSES)
def test_every_optimizer_of_torch_is_built_by_its_lower_case_name_and_descends(name: str) -> None:
    embedding = nn.Embedding(2, 3, sparse=name == "SparseAdam")
    before = embedding.weight.detach().square().sum()
    # A file of settings has lists where torch has tuples.
    defaults = {name: p.default for name, p in inspect.signature(_CLASSES[name]).parameters.items()}
    lists = {name: list(value) for name, value in defaults.items() if isinstance(value, tuple)}
    optimizer = OPTIMIZERS.build(
        params=embedding.parameters(), type=name.lower(), **{"lr": 0.01, **lists}
    )
    # torch's Muon on shards gathers each matrix many times.
    assert type(optimizer) is (ShardedMuon if name == "Muon" else _CLASSES[name])
    _descend(optimizer, embedding.weight, embedding)
    assert embedding.weight.detach().square().sum() < before


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_adam_is_fused_and_differs_by_rounding_only(name: str, dtype: torch.dtype) -> None:
    fused, looped = (nn.Parameter(torch.linspace(-1, 1, 37, dtype=dtype)) for _ in range(2))
    first = OPTIMIZERS.build(params=[fused], type=name, lr=0.01, weight_decay=0.1)
    second = OPTIMIZERS.build(params=[looped], type=name, lr=0.01, weight_decay=0.1, foreach=False)
    assert first.defaults["fused"] and not second.defaults["fused"]
    _descend(first, fused)
    _descend(second, looped)
    # In half precision the fused form computes in float32 and rounds once an update.
    torch.testing.assert_close(
        fused, looped, **({"atol": 4e-3, "rtol": 0.0} if dtype == torch.bfloat16 else {})
    )


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_the_users_choice_of_implementation_stands(options: dict[str, Any]) -> None:
    optimizer = OPTIMIZERS.build(params=[nn.Parameter(torch.ones(2))], type="adamw", **options)
    assert not optimizer.defaults["fused"]
    grouped = OPTIMIZERS.build(
        params=[{"params": [nn.Parameter(torch.ones(2))], **options}], type="adamw"
    )
    assert not grouped.defaults["fused"]


def test_lists_from_a_file_become_tuples() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    assert OPTIMIZERS.build(params=[parameter], type="adamw", betas=[0.8, 0.9]).defaults[
        "betas"
    ] == (0.8, 0.9)
    group = OPTIMIZERS.build(
        params=[{"params": [parameter], "betas": [0.8, 0.9]}], type="adamw"
    ).param_groups[0]
    assert group["betas"] == (0.8, 0.9)


def test_generators_and_named_parameters_are_taken() -> None:
    model = nn.Linear(3, 2)
    assert (
        len(OPTIMIZERS.build(params=model.parameters(), type="AdamW").param_groups[0]["params"])
        == 2
    )
    assert OPTIMIZERS.build(params=model.named_parameters(), type="sgd").param_groups[0][
        "param_names"
    ] == [
        "weight",
        "bias",
    ]
    groups = [{"params": (p for p in model.parameters()), "lr": 0.5}]
    assert len(OPTIMIZERS.build(params=groups, type="adam").param_groups[0]["params"]) == 2
    assert (
        len(
            OPTIMIZERS.build(params=[{"params": model.weight}], type="adam").param_groups[0][
                "params"
            ]
        )
        == 1
    )


@pytest.mark.parametrize("way", ["line", "file", "set"])
@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("optim.rl", 0.1, "lr"),
        ("optim.momentun", 0.1, "momentum"),
        ("optim.param_groups", [{"pattern": "weight", "optoins": {"lr": 1.0}}], "options"),
        ("scheduler.gama", 0.1, "gamma"),
        ("dataloader.bacth_size", 2, "batch_size"),
        ("checkpoint.intervla", 2, "interval"),
        ("sede", 2, "seed"),
    ],
)
def test_unknown_key_names_the_nearest_one_however_it_is_set(
    key: str, value: Any, meant: str, way: str, tmp_path: Path
) -> None:
    config = dl.RunnerConfig(
        settings(tmp_path / "run", epochs=1, scheduler={"type": "steplr", "step_size": 1})
    )
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        if way == "line":
            config.parse([f"--{key}={json.dumps(value)}"])
        elif way == "file":
            file = tmp_path / "more.yaml"
            file.write_text(yaml.safe_dump({key: value}))
            config.merge_from_file(file)
        else:
            config.set(key, value)
        Small(config)


@pytest.mark.parametrize(
    ("type", "given", "message"),
    [
        ("sgd", {"params": []}, "at least one parameter .* Received: none"),
        ("sgd", {"params": [{"params": []}]}, "at least one parameter .* Received: none"),
        ("sgd", {"params": [{"lr": 0.1}]}, r"`params`. Received: keys \['lr'\]"),
        ("sgd", {"params": {nn.Parameter(torch.ones(1))}}, "Received: a set"),
        ("adamm", {}, "adadelta, .*sparseadam. Received: type='adamm'. Did you mean 'adam"),
        (None, {}, "sparseadam. Received: type=None"),
        ("sgd", {"momentun": 0.9}, "Received: 'momentun'. Did you mean 'momentum'"),
        (
            "sgd",
            {"params": [{"params": [nn.Parameter(torch.ones(1))], "momentun": 0.9}]},
            "parameter group of optimizer 'sgd'.* Received: 'momentun'. Did you mean 'momentum'",
        ),
    ],
)
def test_bad_input_names_the_mend(type: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OPTIMIZERS.build(**{"params": [nn.Parameter(torch.ones(1))], **given}, type=type)


def test_a_users_optimizer_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_known", dict(OPTIMIZERS._known))

    @OPTIMIZERS.register("sign")
    class Sign(torch.optim.SGD):
        pass

    for name in ("Sign", "sign", "si-gn"):
        assert (
            type(OPTIMIZERS.build(params=[nn.Parameter(torch.ones(1))], type=name, lr=0.1)) is Sign
        )


# Groups


@pytest.fixture
def model() -> nn.Module:
    return nn.ModuleDict(
        {"body": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    )


def _groups(model: nn.Module, groups: list[dict[str, Any]], **bases: Any) -> list[dict[str, Any]]:
    return build_param_groups(
        model.named_parameters(), groups=groups, **{"lr": 0.1, "weight_decay": 0.01, **bases}
    )


def _names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in group["params"]]


def test_the_first_match_wins_and_the_rest_comes_first(model: nn.Module) -> None:
    groups = _groups(
        model,
        [
            {"pattern": r"^head\.", "lr_multiplier": 10},
            {"pattern": "bias|norm", "weight_decay_multiplier": 0},
        ],
    )
    assert [_names(model, group) for group in groups] == [
        ["body.weight"],
        ["head.weight", "head.bias"],
        ["body.bias", "norm.weight", "norm.bias"],
    ]
    assert groups[1]["lr"] == 1.0 and "weight_decay" not in groups[1]
    assert groups[2]["weight_decay"] == 0.0 and "lr" not in groups[2]
    optimizer = OPTIMIZERS.build(params=groups, type="adamw", lr=0.1, weight_decay=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0, 0.1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.01, 0.0]


def test_one_beta_leaves_the_other(model: nn.Module) -> None:
    groups = _groups(
        model,
        [{"pattern": "head", "beta2": 0.95}, {"pattern": "norm", "beta1": 0.0}],
        betas=[0.8, 0.9],
    )
    assert groups[1]["betas"] == (0.8, 0.95)
    assert groups[2]["betas"] == (0.0, 0.9)


def test_options_are_passed_on_and_multiplied(model: nn.Module) -> None:
    groups = _groups(
        model, [{"pattern": "head", "options": {"lr": 0.5, "eps": 1e-6}, "lr_multiplier": 2}]
    )
    assert groups[1]["lr"] == 1.0 and groups[1]["eps"] == 1e-6


def test_frozen_parameters_are_left_out_but_match(model: nn.Module) -> None:
    model["head"].requires_grad_(False)  # type: ignore[index]
    model["norm"].bias.requires_grad_(False)  # type: ignore[index]
    groups = _groups(model, [{"pattern": "head"}, {"pattern": "norm"}])
    assert [_names(model, group) for group in groups] == [
        ["body.weight", "body.bias"],
        ["norm.weight"],
    ]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [{"pattern": "bias"}, {"pattern": "haed"}],
            "pattern='haed'; the parameters begin with .'body.weight'",
        ),
        (
            [{"pattern": "."}, {"pattern": "bias"}],
            "no earlier entry takes. Received: pattern='bias'",
        ),
        ([{"lr_multiplier": 2}], "a `pattern`"),
        ([{"pattern": "head", "lr_multiplyer": 2}], "lr_multiplyer"),
        ([{"pattern": "("}], "regular expression"),
        ([{"pattern": "head", "weight_decay_multiplier": 0}], "optim.weight_decay to be set"),
    ],
)
def test_a_bad_entry_is_an_error(
    model: nn.Module, entries: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _groups(model, entries, weight_decay=None)


def test_groups_of_the_configuration_and_a_rank_without_trained_weights(model: nn.Module) -> None:
    settings = {"type": "adamw", "lr": 0.1, "weight_decay": 0.5}
    groups = [{"pattern": r"bias$", "weight_decay_multiplier": 0.0}]
    built = build_optimizer(
        {**settings, "param_groups": groups},
        model.named_parameters,
        model=model,
        device=torch.device("cpu"),
    )
    assert {group["weight_decay"]: len(group["params"]) for group in built.param_groups} == {
        0.0: 3,
        0.5: 3,
    }
    model.requires_grad_(False)
    whole = {"0.weight": True, "1.weight": False}
    built = build_optimizer(
        settings, model.named_parameters, model=model, device=torch.device("cpu"), whole=whole
    )
    assert [group["params"] for group in built.param_groups] == [[]] and built.param_groups[0][
        "lr"
    ] == 0.1
    built.step()
    with pytest.raises(ValueError, match="Unfreeze a layer"):
        build_optimizer(settings, model.named_parameters, model=model, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_float16_on_the_cpu_is_not_fused_since_its_eps_is_zero_there(name: str) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 64, dtype=torch.float16))
    optimizer = OPTIMIZERS.build(params=[weight], type=name, lr=0.01, eps=1e-4)
    assert not optimizer.defaults.get("fused")
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()
    assert weight.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("joint", [False, True])
def test_fused_sgd_over_half_precision_is_refused_where_it_has_no_effect(
    dtype: torch.dtype, joint: bool, tmp_path: Path
) -> None:
    """Releases of torch differ in it."""

    class Half(dl.Runner):
        def __init__(self, fused: bool) -> None:
            super().__init__({"steps": 1, "dir": str(tmp_path / str(fused)), "log": False})
            self.datasets = {
                "train": TensorDataset(
                    torch.ones(4, 20, dtype=dtype), torch.zeros(4, 1, dtype=dtype)
                )
            }
            self.model, self.criterion = nn.Linear(20, 1, bias=False, dtype=dtype), nn.MSELoss()
            sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=fused)
            self.optimizer = dl.optim.JointOptimizer(sgd) if joint else sgd

    def moves(fused: bool) -> bool:
        with Half(fused) as runner:
            before = runner.model.weight.detach().clone()
            runner.train()
            return bool((runner.model.weight != before).all())

    weights = torch.zeros(20, dtype=dtype, requires_grad=True)
    weights.grad = torch.ones(20, dtype=dtype)
    torch.optim.SGD([weights], lr=0.1, fused=True).step()
    if bool((weights != 0).all()):
        assert moves(True)
    else:
        with pytest.raises(ValueError, match="fused=False"):
            moves(True)
    assert moves(False)
