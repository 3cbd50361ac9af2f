from __future__ import annotations

from typing import Any

import pytest

from danling.optim.registry import Registry


def _double(thing: Any, factor: float, *, offset: float = 0.0) -> tuple[Any, float, float]:
    return thing, factor, offset


@pytest.fixture
def registry() -> Registry:
    return Registry("thing", {"double": _double, "open": lambda thing, **options: options})


@pytest.mark.parametrize("name", ["double", "Double", "DOUBLE", "dou-ble", "dou_ble"])
def test_case_and_separators_do_not_matter(registry: Registry, name: str) -> None:
    assert registry.lookup(name) is _double
    assert name in registry


def test_an_unknown_name_lists_the_known_and_the_nearest(registry: Registry) -> None:
    with pytest.raises(
        ValueError, match="thing type to be one of double, open. Received: type='duoble'. Did you mean 'double'"
    ):
        registry.lookup("duoble")


def test_no_name_lists_the_known(registry: Registry) -> None:
    with pytest.raises(ValueError, match="one of double, open. Received: type=None"):
        registry.lookup(None)


def test_an_unknown_option_lists_the_valid_and_the_nearest(registry: Registry) -> None:
    with pytest.raises(
        ValueError, match="'double' out of thing, factor, offset. Received: 'ofset'. Did you mean 'offset'"
    ):
        registry.check_options("double", {"factor": 1, "ofset": 2})


def test_a_missing_option_is_named(registry: Registry) -> None:
    with pytest.raises(ValueError, match="'double' to be given factor, which it has no default for. Received: offset"):
        registry.check_options("double", {"offset": 2})


def test_a_builder_that_takes_anything_is_given_anything(registry: Registry) -> None:
    registry.check_options("open", {"whatever": 1})
    assert registry.options("open") is None
    assert registry.accepts("double", "factor") and not registry.accepts("double", "whatever")


def test_register_is_a_decorator(registry: Registry) -> None:
    @registry.register("My-Own")
    def build(thing: Any) -> str:
        return "own"

    assert registry.lookup("myown") is build
    assert build(None) == "own"
    assert "My-Own" in registry.names()
