"""Every public name says what it is, and a method of a runner that not all ranks have to call says so."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

ROOMS = [
    "danling",
    "danling.data",
    "danling.distributed",
    "danling.mesh",
    "danling.metrics",
    "danling.optim",
    "danling.runners",
    "danling.stream",
    "danling.checkpoints",
    "danling.supervision",
    "danling.training",
    "danling.workspace",
]


def members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that the library itself defines, as they stand in their class."""
    for name in dir(cls):
        owner = next(base for base in cls.__mro__ if name in base.__dict__)
        value = owner.__dict__[name]
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if not name.startswith("_") and owner.__module__.startswith("danling"):
            yield name, value


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring(room: str) -> None:
    module = importlib.import_module(room)
    silent = []
    for name in module.__all__:
        value = getattr(module, name)
        described = inspect.isclass(value) or callable(value) or inspect.ismodule(value)
        if described and not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value):
            silent += [
                f"{name}.{member}"
                for member, inner in members_of(value)
                if (inspect.isfunction(inner) or isinstance(inner, property))
                and not inspect.getdoc(inner)
                and not _inherits_words(value, member)
            ]
    assert silent == []


def _inherits_words(cls: type, member: str) -> bool:
    return any(
        inspect.getdoc(base.__dict__[member]) for base in cls.__mro__ if member in base.__dict__
    )


PLAIN = (
    "config",
    "data",
    "dataset",
    "evaluate_splits",
    "model",
    "modules",
    "split",
    "train_splits",
)
"""Arguments whose names say what they are."""


def test_every_method_of_a_runner_explains_its_arguments() -> None:
    runner = importlib.import_module("danling").TorchRunner
    unexplained = []
    for name, value in members_of(runner):
        if not inspect.isfunction(value):
            continue
        takes = [
            name
            for name in inspect.signature(value).parameters
            if name not in ("self", "cls", *PLAIN)
        ]
        _, _, explained = (inspect.getdoc(value) or "").partition("Args:\n")
        unexplained += [
            f"{name}({argument})"
            for argument in takes
            if not re.search(rf"\*?\b{argument}:", explained)
        ]
    assert unexplained == []
