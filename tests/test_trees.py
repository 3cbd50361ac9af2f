"""Containers are walked in one way: what is in them, by the keys that lead there."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from danling.utils.plain import finite, json_text
from danling.utils.trees import dotted, leaves, tensors


@dataclass
class Pair:
    first: Any
    second: Any


VALUE = {
    "a": [1, (torch.ones(2), "text")],
    "b": OrderedDict({"c": torch.zeros(1)}),
    "d": {},
    5: None,
}


def test_leaves_come_with_their_keys_in_order() -> None:
    found = [
        (path, leaf if not isinstance(leaf, torch.Tensor) else leaf.tolist())
        for path, leaf in leaves(VALUE)
    ]
    assert found == [
        (("a", 0), 1),
        (("a", 1, 0), [1.0, 1.0]),
        (("a", 1, 1), "text"),
        (("b", "c"), [0.0]),
        ((5,), None),
    ]
    assert [dotted(path) for path, _ in tensors(VALUE)] == ["a.1.0", "b.c"]
    assert [path for path, _ in tensors(torch.ones(1))] == [()]


def test_opened_values_are_walked_in_place_of_objects() -> None:
    def opened(value: object) -> object:
        return vars(value) if isinstance(value, Pair) else value

    value = Pair(torch.ones(1), [Pair(2, 3)])
    assert [path for path, _ in leaves(value, opened=opened)] == [
        ("first",),
        ("second", 0, "first"),
        ("second", 0, "second"),
    ]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_without_a_json_form_are_replaced_at_any_depth(number: float) -> None:
    value = {1: [number, (2.0, {"x": number})]}
    assert finite(value, str) == {"1": [str(number), [2.0, {"x": str(number)}]]}
    assert json.loads(json_text(value)) == {"1": [None, [2.0, {"x": None}]]}
