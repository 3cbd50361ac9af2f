"""The JSON schema of the configuration, and the completion of the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import danling as dl
from danling.cli.main import main
from danling.config.json_schema import schema

jsonschema = pytest.importorskip("jsonschema")


def test_defaults_and_a_users_file_are_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema"]) == 0
    checker = jsonschema.Draft202012Validator(json.loads(capsys.readouterr().out))
    checker.check_schema(checker.schema)
    checker.validate(dl.RunnerConfig().plain())
    text = """
        seed: 1
        epochs: ${training.epochs}
        patience: .inf
        optim: {type: adamw, lr: 1.0e-3}
        training: {epochs: 3, own: [1, 2]}
        dataloader: {batch_size: 8, val: {batch_size: 16}}
        checkpoint: {interval: 2, remote: {url: null}}
        evaluate_splits: [val, test]
        ema:
    """
    checker.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"checkpoint": {"intervall": 2}}, "intervall"),
        ({"seed": -1}, "seed"),
        ({"accum_steps": 0}, "accum_steps"),
        ({"gradient_sum": "exact"}, "gradient_sum"),
        ({"ema": {"decay": 1.0}}, "decay"),
        ({"parallel": {"axes": {"shards": 2}}}, "shards"),
    ],
)
def test_settings_refused_by_a_runner_are_invalid(wrong: dict[str, Any], key: str) -> None:
    errors = list(jsonschema.Draft202012Validator(schema()).iter_errors(wrong))
    assert errors and key in f"{errors[0].json_path} {errors[0].message}"
    with pytest.raises((ValueError, TypeError)):
        dl.RunnerConfig(wrong)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    ask = """
        source "$1"
        COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
        $(complete -p danling | sed 's/.*-F \\([^ ]*\\).*/\\1/') danling
        echo "${COMPREPLY[@]}"
    """

    def completed(*words: str) -> list[str]:
        command = ["bash", "-c", ask, "bash", str(tmp_path / "script"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()

    assert {"verify", "inspect"} <= {*completed("danling", "")}
    assert completed("danling", "ver") == ["verify"]
    assert "--level" in completed("danling", "verify", "--l")
