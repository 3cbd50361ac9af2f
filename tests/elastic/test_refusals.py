"""What cannot be continued without a rank is refused when the runner is constructed, with the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import danling as dl
from danling.elastic import attach
from danling.elastic.wire import ADDRESS
from danling.runners.base_runner import BaseRunner

from .training import settings


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that can, also where this one cannot: the refusals after it are those of the settings."""
    monkeypatch.setattr(attach, "check_supported", lambda: None)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gradient_sum": "fast"}, "gradient_sum='fast'. Set gradient_sum='canonical'"),
        ({"train_metrics": ["loss"]}, "train_metrics"),
        ({"backend": "mpi"}, "backend='mpi'"),
        ({"compile": {"enable": True}}, "compile.enable=True"),
        ({"checkpoint": {"backend": "dcp"}}, "checkpoint.backend='dcp'"),
        (
            {"checkpoint": {"remote": {"url": "s3://bucket/run"}}},
            "checkpoint.remote.url='s3://bucket/run'",
        ),
        ({"audit": {"digest_interval": 5}}, "a setting of `audit`"),
    ],
)
def test_setting_that_needs_all_ranks_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="settings that allow a rank to end") as caught:
        dl.Runner(settings(workspace_root=str(tmp_path), elastic={"enabled": True}, **more))
    assert message in str(caught.value)


@pytest.mark.usefixtures("supported")
def test_runner_with_its_own_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stack='base'. Train on ddp"):
        BaseRunner(settings(workspace_root=str(tmp_path), elastic={"enabled": True}))


@pytest.mark.usefixtures("supported")
def test_program_without_a_coordinator_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    with pytest.raises(ValueError, match="danling run --ranks N -- python train.py"):
        dl.Runner(settings(workspace_root=str(tmp_path), elastic={"enabled": True}))


def test_settings_do_not_change_the_id_of_a_run(tmp_path: Path) -> None:
    plain = dl.RunnerConfig(settings(workspace_root=str(tmp_path)))
    elastic = dl.RunnerConfig(
        settings(workspace_root=str(tmp_path), elastic={"enabled": True, "min_ranks": 2})
    )
    assert plain.config_id() == elastic.config_id()
