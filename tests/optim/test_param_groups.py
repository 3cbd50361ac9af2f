from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from danling.optim import OPTIMIZERS, build_param_groups


@pytest.fixture
def model() -> nn.Module:
    return nn.ModuleDict({"body": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})


def _groups(model: nn.Module, groups: list[dict[str, Any]], **bases: Any) -> list[dict[str, Any]]:
    return build_param_groups(model.named_parameters(), groups=groups, **{"lr": 0.1, "weight_decay": 0.01, **bases})


def _names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in group["params"]]


def test_the_first_match_wins_and_the_rest_comes_first(model: nn.Module) -> None:
    groups = _groups(
        model, [{"pattern": r"^head\.", "lr_multiplier": 10}, {"pattern": "bias|norm", "weight_decay_multiplier": 0}]
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
    groups = _groups(model, [{"pattern": "head", "beta2": 0.95}, {"pattern": "norm", "beta1": 0.0}], betas=[0.8, 0.9])
    assert groups[1]["betas"] == (0.8, 0.95)
    assert groups[2]["betas"] == (0.0, 0.9)


def test_options_are_passed_on_and_multiplied(model: nn.Module) -> None:
    groups = _groups(model, [{"pattern": "head", "options": {"lr": 0.5, "eps": 1e-6}, "lr_multiplier": 2}])
    assert groups[1]["lr"] == 1.0 and groups[1]["eps"] == 1e-6


def test_frozen_parameters_are_left_out_but_match(model: nn.Module) -> None:
    model["head"].requires_grad_(False)  # type: ignore[index]
    model["norm"].bias.requires_grad_(False)  # type: ignore[index]
    groups = _groups(model, [{"pattern": "head"}, {"pattern": "norm"}])
    assert [_names(model, group) for group in groups] == [["body.weight", "body.bias"], ["norm.weight"]]


def test_a_group_of_everything_is_the_only_one(model: nn.Module) -> None:
    assert len(_groups(model, [{"pattern": ".", "lr_multiplier": 2}])) == 1


@pytest.mark.parametrize("pattern", ["haed", "^ead"])
def test_a_pattern_that_matches_nothing_is_an_error(model: nn.Module, pattern: str) -> None:
    with pytest.raises(
        ValueError, match=f"Received: pattern={re.escape(repr(pattern))}; the parameters begin with .'body.weight'"
    ):
        _groups(model, [{"pattern": "bias"}, {"pattern": pattern}])


def test_a_pattern_that_an_earlier_one_shadows_is_an_error(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no earlier entry takes. Received: pattern='bias'"):
        _groups(model, [{"pattern": "."}, {"pattern": "bias"}])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"lr_multiplier": 2}, "a `pattern`"),
        ({"pattern": "head", "lr_multiplyer": 2}, "lr_multiplyer"),
        ({"pattern": "("}, "regular expression"),
    ],
)
def test_a_bad_entry_is_an_error(model: nn.Module, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _groups(model, [entry])


def test_a_multiplier_needs_a_base(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="optim.weight_decay to be set"):
        _groups(model, [{"pattern": "head", "weight_decay_multiplier": 0}], weight_decay=None)
