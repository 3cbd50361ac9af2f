"""Parts of the configuration by themselves: spans of time, own keys, stacks, and settings put over others."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import danling
from danling.config.checks import seconds_of
from danling.config.files import as_mapping
from danling.config.identity import overlay
from danling.config.names import BACKENDS, STACKS, counts_flops, stack_named
from danling.config.schema import CheckpointConfig


@pytest.mark.parametrize(
    ("limit", "seconds"), [(90, 90.0), ("90", 90.0), ("1:30", 90.0), ("01:00:30", 3630.0), ("0:00.5", 0.5)]
)
def test_a_span_of_time_is_seconds_or_a_clock(limit: float | str, seconds: float) -> None:
    assert seconds_of("max_time", limit) == seconds


@pytest.mark.parametrize("limit", [0, -1, "soon", "1:2:3:4", "0:00", float("nan")])
def test_another_span_is_refused_by_its_key(limit: float | str) -> None:
    with pytest.raises(ValueError, match="Expected max_time to be seconds or 'HH:MM:SS'. Received: max_time="):
        seconds_of("max_time", limit)


def test_a_stack_is_known_by_its_aliases() -> None:
    assert [stack_named(name) for name in ("auto", "Torch", "D-D_P", "DS", "parallel")] == [
        "ddp",
        "ddp",
        "ddp",
        "deepspeed",
        "parallel",
    ]
    with pytest.raises(ValueError, match=r"'deepspeed'.*Received: stack='deepsped'.*Did you mean 'deepspeed'"):
        stack_named("deepsped")


def test_stacks_say_what_they_write_and_where_flops_are_counted() -> None:
    assert {"auto", *BACKENDS} <= set(get_args(get_type_hints(CheckpointConfig)["backend"]))
    assert [name for name in STACKS if counts_flops(name)] == ["ddp", "accelerate"]
    assert not counts_flops("one of a user's own")


def test_settings_are_a_mapping_a_file_or_parsed_words(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("steps: 3\n")
    assert as_mapping(None) == {} and as_mapping({"a": 1}) == {"a": 1}
    assert as_mapping(file) == as_mapping(str(file)) == as_mapping(Namespace(steps=3)) == {"steps": 3}
    with pytest.raises(TypeError, match="Expected a mapping or the path of a file. Received: 3 "):
        as_mapping(3)


def test_nested_settings_go_over_others_key_by_key() -> None:
    base: dict[str, Any] = {"a": {"b": 1, "c": 2}, "d": 3}
    overlay(base, {"a": {"c": 4}, "d": {"e": 5}})
    assert base == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}


def test_one_module_imports_chanfig() -> None:
    package = Path(danling.__file__).parent
    importing = [
        path for path in package.rglob("*.py") if re.search(r"^\s*(from|import) chanfig", path.read_text(), re.M)
    ]
    assert [str(path.relative_to(package)) for path in importing] == ["config/fields.py"]
