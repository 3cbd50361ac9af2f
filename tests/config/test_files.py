"""Files of settings: a key that is there twice is refused, and every value of the user's comes back as it was saved."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import run_processes
from support.toys import Line, settings

import danling as dl

TWICE = {
    "top.yaml": ("epochs: 1\nseed: 3\nepochs: 2\n", "'epochs' twice, in lines 1 and 3"),
    "section.yaml": ("optim:\n  lr: 1\n  type: sgd\n  lr: 2\n", "'lr' twice, in lines 2 and 4"),
    "in_a_list.yml": (
        "optim:\n  param_groups:\n  - pattern: a\n    pattern: b\n",
        "'pattern' twice, in lines 3 and 4",
    ),
    "own.yaml": ("model: {width: 1, depth: 2, width: 3}\n", "'width' twice, in line 1"),
    "numbers.yaml": ("model:\n  3: a\n  3: b\n", "'3' twice, in lines 2 and 3"),
    "anchor.yaml": ("model: &a\n  w: 1\n  w: 2\nother: *a\n", "'w' twice, in lines 2 and 3"),
    "plain.json": ('{\n\t"epochs": 1,\n\t"epochs": 2\n}', "'epochs' twice, in lines 2 and 3"),
    "section.json": ('{"optim": {"lr": 1,\n "lr": 2}}', "'lr' twice, in lines 1 and 2"),
    "dotted.yaml": (
        "optim.lr: 1\noptim:\n  lr: 2\n",
        "'optim.lr' twice, written as 'optim.lr' and as 'optim > lr'",
    ),
    "dotted.json": ('{"optim.lr": 1, "optim": {"lr": 2}}', "'optim.lr' twice, written as"),
}


def read(path: Path) -> Any:
    return dl.RunnerConfig(str(path))


def parse(path: Path) -> Any:
    return dl.RunnerConfig().parse(["--config", str(path)])


def include(path: Path) -> Any:
    path.with_name("outer.yaml").write_text(f"model: !include {path.name}\n")
    return dl.RunnerConfig(str(path.with_name("outer.yaml")))


@pytest.mark.parametrize("reader", [read, parse, dl.RunnerConfig.from_file, include])
@pytest.mark.parametrize("name", TWICE)
def test_a_key_twice_is_refused_with_its_lines(
    name: str, reader: Callable[[Path], Any], tmp_path: Path
) -> None:
    text, expected = TWICE[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        reader(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)


def test_a_key_twice_on_the_command_line_and_in_a_stream(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'lr' twice, in line 1"):
        dl.RunnerConfig().parse(["--optim", "{lr: 1, lr: 2}"])
    with pytest.raises(ValueError, match="'epochs' twice, in lines 1 and 2"):
        dl.RunnerConfig.from_yamls("epochs: 1\nepochs: 2\n")


@pytest.mark.parametrize(
    "text",
    [
        "base: &b {lr: 1}\noptim:\n  <<: *b\n  lr: 2\n",
        "optim.type: sgd\noptim:\n  lr: 2\n",
        "model: {lr: 1}\noptim: {lr: 2}\n",
    ],
)
def test_overriding_and_merged_keys_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert dl.RunnerConfig(str(path)).optim.lr == 2


TEXTS = [
    "1e-3",
    "1E5",
    ".5e3",
    "-2e-3",
    "0x10",
    "010",
    "1_000",
    "yes",
    "null",
    "1:30",
    "2020-01-01",
    "",
    "1.0",
    ".inf",
]


def typed(value: object) -> object:
    """Return a value with the types in it: `==` finds 1, 1.0 and True equal."""
    if isinstance(value, dict):
        return {(type(name), name): typed(item) for name, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), value)


def check_round_trip(config: Any, path: Path) -> None:
    config.save(path)
    again = dl.RunnerConfig()
    again.declare(config)
    again.merge_from_file(path)
    assert typed(again.plain()) == typed(config.plain())
    assert again.config_id() == config.config_id() and not again.differences(config.plain())


@pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
def test_text_comes_back_as_text(suffix: str, tmp_path: Path) -> None:
    config = dl.RunnerConfig(
        {"own": {"texts": TEXTS, **{f"key{i}": text for i, text in enumerate(TEXTS)}}, "seed": 1}
    )
    check_round_trip(config, tmp_path / f"c.{suffix}")


def test_numeric_keys_and_infinities_come_back(tmp_path: Path) -> None:
    config = dl.RunnerConfig(
        {"own": {"classes": {3: "cat", 10: "dog", "4": "text"}, 0.5: 1, True: 2}, "rate": math.inf}
    )
    check_round_trip(config, tmp_path / "c.yaml")
    assert config.own.classes[3] == "cat"


def test_id_with_numeric_keys_equals_the_id_with_text_keys() -> None:
    numbered, text = (
        dl.RunnerConfig({"own": {3: {"a": 1}}}),
        dl.RunnerConfig({"own": {"3": {"a": 1}}}),
    )
    assert numbered.config_id() == text.config_id() and not numbered.differences(text.plain())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({3: "cat"}, "the key 3 of own"),
        ({"rate": math.inf}, r"own\.rate=inf"),
        ({"deep": [{4: 1}]}, r"key 4 of own\.deep"),
    ],
)
def test_value_without_a_json_form_is_refused_and_leaves_the_file(
    own: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    path.write_text("before")
    with pytest.raises(ValueError, match=f"{message}.*Save the configuration as YAML"):
        dl.RunnerConfig({"own": own}).save(path)
    assert path.read_text() == "before"


def continue_with_keys(root: str, stack: str) -> tuple[Any, Any]:
    given = {"stack": stack, "own": {"classes": {3: "cat"}, "rate": "1e-3"}, "epochs": 1}
    with Line(settings(root, **given)) as runner:
        runner.train()
    with Line.from_checkpoint(
        f"{root}/checkpoints/latest{'' if stack == 'parallel' else '.pth'}", {"epochs": 2}
    ) as runner:
        runner.train()
        return runner.config.own.classes[3], runner.config.own.rate


@pytest.mark.parametrize("stack", ["ddp", "parallel"])
def test_a_resumed_run_has_the_keys_and_texts_of_the_first(stack: str, tmp_path: Path) -> None:
    assert run_processes(continue_with_keys, str(tmp_path), stack, world_size=1) == [
        ("cat", "1e-3")
    ]
