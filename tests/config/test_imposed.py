"""Settings that the environment imposes on the runs of a program that knows nothing of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.toys import TracingRunner
from torch import nn

import danling as dl
from danling.config import imposed as imposed_settings
from danling.config.imposed import VARIABLE, MeantRun, end_after, impose, imposed, imposing


def test_what_is_imposed_is_read_back_and_nothing_is_imposed_by_default() -> None:
    settings = {"dir": "scratch", "checkpoint.interval": 3, "auto_resume": False, "resume": None}
    assert imposed(imposing(settings)) == settings
    assert imposed({}) == {} and imposed({VARIABLE: ""}) == {}


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_variable_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expected DANLING_SETTINGS to be a JSON object .* Unset it"):
        imposed({VARIABLE: text})


def test_a_run_takes_them_above_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = dl.RunnerConfig(seed=1, steps=9, workspace_root=str(tmp_path / "own"))
    given.checkpoint.interval = 5
    for name, value in imposing({"dir": str(tmp_path / "scratch"), "checkpoint.interval": 2}).items():
        monkeypatch.setenv(name, value)
    # Other tests of a session may have opened logs of runs, which keep what they say to themselves.
    logger = logging.getLogger("danling")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING, logger="danling"):
            impose(dl.RunnerConfig())
    finally:
        logger.removeHandler(caplog.handler)
    with TracingRunner(given) as runner:
        assert runner.workspace.dir == tmp_path / "scratch" and runner.config.checkpoint.interval == 2
        assert runner.config.steps == 9
    assert given.checkpoint.interval == 5 and not (tmp_path / "own").exists()
    assert "DANLING_SETTINGS sets dir, checkpoint.interval in the place of" in caplog.text


def test_one_that_cannot_be_is_refused_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, '{"checkpoint.intervall": 2}')
    with pytest.raises(ValueError, match=r"Did you mean 'checkpoint.interval'|interval"):
        TracingRunner({"seed": 1, "steps": 1, "workspace_root": str(tmp_path)})


@pytest.mark.parametrize(
    ("lineage", "place", "looks", "steps"),
    [("a", "run", False, 9), ("a", "{root}/run", False, 9), ("b", "run", False, 5), ("a", None, False, 5), ("b", "run", True, 7)],
)  # fmt: skip
def test_the_run_that_is_meant_is_told_by_its_names(
    lineage: str, place: str | None, looks: bool, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meant = MeantRun({"lineage": "a", "dir": "run"}, str(tmp_path / "run"), others={"steps": 5}, looks={"steps": 7})
    for name, value in {**imposing({"steps": 9}), **meant.write(tmp_path / "new" / "meant.json")}.items():
        monkeypatch.setenv(name, value)
    config = dl.RunnerConfig(lineage=lineage, dir=place and place.format(root=tmp_path), steps=3)
    config.checkpoint.load_only = looks
    assert MeantRun({"lineage": "a"}, None, others={}, looks={}).is_meant(config) == (lineage == "a")
    impose(config)
    assert config.steps == steps


def test_behind_the_run_that_is_meant_the_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed_settings, "_has_ended", False)
    end_after()
    impose(dl.RunnerConfig())
    meant = MeantRun({"lineage": "a"}, None, others={}, looks={})
    for name, value in meant.write(tmp_path / "meant.json").items():
        monkeypatch.setenv(name, value)
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
