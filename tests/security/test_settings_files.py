"""Files with settings that were made to cost more than their size: read with bounds, whoever reads them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from support.toys import Small, settings

import danling as dl
from danling.config.inputs import read_settings
from danling.utils.plain import parse_yaml
from danling.workspace.runs import Run

SIXTIES = ":".join(["59"] * 100_000)
"""A number to base 60, whose digits come to 178,000 decimal ones."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        (SIXTIES, SIXTIES),
        (f"{SIXTIES}.5", f"{SIXTIES}.5"),
        ("9" * 5000, "9" * 5000),
        ("685_230", 685_230),
        ("-0x1F", -31),
        ("0b101", 5),
        ("017", 15),
        ("0", 0),
        ("3.5", 3.5),
        ("-.5e+3", -500.0),
        ("1_0.5", 10.5),
        (".inf", float("inf")),
        ("2001-12-14", yaml.safe_load("2001-12-14")),
        ("yes", True),
        ("~", None),
    ],
)
def test_numbers_are_those_without_base_60(text: str, expected: object, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f"a: {text}\nb: [{text}]\n")
    for read in (parse_yaml(file.read_text()), read_settings(file)):
        assert read == {"a": expected, "b": [expected]} and type(read["a"]) is type(expected)


@pytest.mark.parametrize("tag", ["int", "float"])
def test_number_to_base_60_with_its_tag_is_refused(tag: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(f'a: !!{tag} "{SIXTIES}"\n')
    with pytest.raises(ValueError, match="is no number"):
        parse_yaml(file.read_text())
    with pytest.raises(ValueError, match="Expected YAML in .* is no number"):
        read_settings(file)


def test_time_limit_by_hours_and_minutes_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("max_time: 12:00:00\n")
    config = dl.RunnerConfig(read_settings(tmp_path / "settings.yaml"))
    assert config.max_time_seconds() == 43_200.0


def test_neighbour_with_hostile_settings_does_not_keep_a_run_from_its_start(tmp_path: Path) -> None:
    config = settings(tmp_path, steps=2, dataloader={"batch_size": 2}, auto_resume=True)
    del config["dir"]
    config["workspace_root"] = str(tmp_path)
    with Small(config) as runner:
        family = runner.workspace.dir.parent
        (family / f"{runner.id[:-16]}{'0' * 16}" / "metadata").mkdir(parents=True)
        (family / f"{runner.id[:-16]}{'0' * 16}" / "metadata" / "config.canonical.yaml").write_text(
            f"seed: {SIXTIES}.5\n"
        )
    with Small(config) as runner:
        runner.train()
        assert runner.state.train.global_step == 2


def test_float_to_base_60_does_not_hide_a_run(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "config.full.yaml").write_text(f"lr: {SIXTIES}.5\nname: a\n")
    run = Run(tmp_path, "a")
    assert run.config["name"] == "a" and not run.problems


def test_includes_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "circle.yaml").write_text("a: !include circle.yaml\n")
    with pytest.raises(ValueError, match="nested deeper than 20 levels, maybe in a circle"):
        read_settings(tmp_path / "circle.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "waits.yaml").write_text("a: !include pipe.yaml\n")
    with pytest.raises(FileNotFoundError, match="pipe.yaml', which does not exist"):
        read_settings(tmp_path / "waits.yaml")
    (tmp_path / "part.yaml").write_text("a: 1\n")
    (tmp_path / "many.yaml").write_text("".join(f"k{n}: !include part.yaml\n" for n in range(1001)))
    with pytest.raises(ValueError, match="more than 1000 files"):
        read_settings(tmp_path / "many.yaml")
    with (tmp_path / "sparse.yaml").open("wb") as sparse:
        sparse.truncate(8 << 30)
    (tmp_path / "large.yaml").write_text("a: !include sparse.yaml\n")
    for name in ("sparse", "large"):
        with pytest.raises(ValueError, match="at most .* bytes"):
            read_settings(tmp_path / f"{name}.yaml")


def test_included_files_are_read_as_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "optim.yaml").write_text("lr: 1e-3\nlimits: !include limits.json\n")
    (tmp_path / "sub" / "limits.json").write_text('{"most": 2}')
    (tmp_path / "all.yaml").write_text(
        "optim: !include sub/optim.yaml\nboth: !includes [sub/optim.yaml, sub/limits.json]\n"
    )
    optim = {"lr": 1e-3, "limits": {"most": 2}}
    assert read_settings(tmp_path / "all.yaml") == {"optim": optim, "both": [optim, {"most": 2}]}
