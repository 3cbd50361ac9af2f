"""Settings that the environment imposes on the runs of a program that knows nothing of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from support.toys import TracingRunner
from torch import nn

import danling as dl
from danling.config import inputs
from danling.config.inputs import VARIABLE, end_after, impose


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expected DANLING_SETTINGS to be a JSON object .* Unset it"),
        ("[1]", "Expected DANLING_SETTINGS to be a JSON object .* Unset it"),
        ('{"checkpoint.intervall": 2}', "Did you mean 'interval'"),
    ],
)
def test_impossible_imposed_settings_are_refused(
    text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=message):
        impose(dl.RunnerConfig())


def test_a_run_takes_them_above_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = dl.RunnerConfig(seed=1, steps=9, workspace_root=str(tmp_path / "own"))
    given.checkpoint.interval = 5
    monkeypatch.setenv(
        VARIABLE, json.dumps({"dir": str(tmp_path / "scratch"), "checkpoint.interval": 2})
    )
    # Other tests of a session may have opened logs of runs, which keep what they say to themselves.
    logger = logging.getLogger("danling")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="danling"):
            impose(dl.RunnerConfig())
    finally:
        logger.removeHandler(caplog.handler)
    with TracingRunner(given) as runner:
        assert (
            runner.workspace.dir == tmp_path / "scratch" and runner.config.checkpoint.interval == 2
        )
        assert runner.config.steps == 9
    assert given.checkpoint.interval == 5 and not (tmp_path / "own").exists()
    assert "DANLING_SETTINGS sets dir, checkpoint.interval in the place of" in caplog.text


def test_program_ends_after_the_imposed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_has_ended", False)
    end_after()
    monkeypatch.setenv(VARIABLE, '{"seed": 1}')
    impose(dl.RunnerConfig())
    end_after()
    with pytest.raises(SystemExit) as ended:
        impose(dl.RunnerConfig())
    assert ended.value.code == 0


def test_the_stack_may_be_imposed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(dl.Runner):
        def __init__(self, config: dict[str, object]) -> None:
            super().__init__(config)
            self.model = nn.Linear(2, 2)

    monkeypatch.setenv(VARIABLE, '{"stack": "parallel"}')
    with Plain({"seed": 1, "dir": str(tmp_path)}) as runner:
        assert isinstance(runner, dl.ParallelRunner)
