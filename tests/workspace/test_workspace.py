"""Where the files of a run are, and that stock readers read them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from danling.config import RunnerConfig
from danling.utils.plain import parse_yaml, yaml_text
from danling.workspace import CodeIdentity, Workspace


def make(root: Path, **settings: Any) -> Workspace:
    return Workspace(settings.pop("dir", root / "run"), timestamp="t0", **settings)


def strict_json(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_overrides_replace_single_paths(tmp_path: Path) -> None:
    workspace = make(
        tmp_path,
        dir=tmp_path / "mine",
        checkpoint_dir=tmp_path / "big",
        log_file=tmp_path / "run.log",
    )
    assert workspace.dir == tmp_path / "mine"
    assert workspace.checkpoints == tmp_path / "big"
    assert workspace.log_file == tmp_path / "run.log"
    assert workspace.best_file == tmp_path / "mine" / "best.json"
    assert make(tmp_path, checkpoint_dir_name="weights").checkpoints.name == "weights"


def test_paths_outlive_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = make(Path("experiments"))
    monkeypatch.chdir("/")
    workspace.create()
    assert (tmp_path / "experiments" / "run").is_dir()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "family").write_text("")
    with pytest.raises(ValueError, match=r"Expected a directory.*family' is a file"):
        make(tmp_path / "family").create()


def test_metadata_is_yaml_and_follows_the_attempt(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    workspace.create()
    config = RunnerConfig(
        {
            "mine": {"root": Path("/x"), "größe": "ü", "flags": {"b", "a"}},
            "optim.betas": (0.9, 0.999),
        }
    )
    code = CodeIdentity("a" * 40, "main", b"diff --git a/x b/x\n\xff\n", ("notes.txt",))
    workspace.write_metadata(config, code)
    read = {
        name: yaml.safe_load((workspace.metadata_dir / f"{name}.yaml").read_text())
        for name in ("config.full", "config.canonical", "config.diff", "git")
    }
    assert read["config.full"]["patience"] == math.inf
    changed = {
        "mine": {"root": "/x", "größe": "ü", "flags": ["a", "b"]},
        "optim": {"betas": [0.9, 0.999]},
    }
    assert read["config.diff"] == changed and changed.items() <= read["config.canonical"].items()
    assert read["git"] == {
        "code_id": code.code_id,
        "sha": "a" * 40,
        "branch": "main",
        "dirty": True,
        "diff_sha": code.diff_sha,
        "untracked": ["notes.txt"],
        "lines_left_out": 0,
    }
    assert (workspace.metadata_dir / "git.diff").read_bytes() == code.diff
    workspace.write_metadata(config, CodeIdentity())
    names = {f"{name}.yaml" for name in read}
    assert {path.name for path in workspace.metadata_dir.iterdir()} == names
    described = yaml.safe_load((workspace.metadata_dir / "git.yaml").read_text())
    assert described["sha"] is described["code_id"] is described["dirty"] is None, "without git"


def test_a_link_in_place_of_the_metadata_is_refused(tmp_path: Path) -> None:
    workspace = make(tmp_path, dir=tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    workspace.dir.mkdir()
    workspace.metadata_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="Expected no link at .*metadata"):
        workspace.create()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_results_are_json_for_every_reader(tmp_path: Path) -> None:
    workspace = make(tmp_path)
    workspace.create()
    results: dict[int, Any] = {
        1: {"val": {"loss": math.nan, "accuracy": torch.tensor(0.5)}},
        2: {"val": {"loss": math.inf}},
    }
    workspace.write_results(
        results, {"index": 2, "result": results[2]}, {"index": 1, "score": -math.inf}
    )
    assert strict_json(workspace.results_file) == {
        "1": {"val": {"loss": None, "accuracy": 0.5}},
        "2": {"val": {"loss": None}},
    }
    assert strict_json(workspace.latest_file) == {"index": 2, "result": {"val": {"loss": None}}}
    assert strict_json(workspace.best_file) == {"index": 1, "score": None}
    workspace.write_results(results, results[2], None)
    assert not workspace.best_file.exists()


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = make(tmp_path)
    workspace.create()
    workspace.write_results({1: {}}, None, None)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        workspace.write_results({2: {}}, None, None)
    assert [path.name for path in workspace.dir.iterdir()] == ["results.json"]
    assert strict_json(workspace.results_file) == {"1": {}}


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": [1, 2.5, 1e-20, float("inf"), None, True, []],
            "b": {},
            "c": {"d": "1e5", "e": "null", "f": "- x", "g": "'", "h": ""},
        },
        {"words " * 5: "words: # and 'more' " * 20, "lines": "a\n b\n\n", "end": "trailing \n"},
        {"": 1, "k" * 200: {"": [2]}},
        {
            "face": "\N{GRINNING FACE}",
            "accent": "é",
            "\N{GRINNING FACE}": 1,
            "line": "\x85\u2028\t\x00",
        },
        {
            "tabs": "one\tof\tmany words " * 20,
            "ends": "one line\nof many " * 20,
            "bells": "\x07" * 200,
        },
    ],
    ids=["plain", "long text", "keys", "not ascii", "escaped"],
)
def test_yaml_is_read_back_as_it_was(value: dict[str, Any]) -> None:
    value = {**value, "same": [shared := [1], shared]}
    assert list(yaml.safe_load(yaml_text(value))) == list(value)
    assert parse_yaml(yaml_text(value)) == value
