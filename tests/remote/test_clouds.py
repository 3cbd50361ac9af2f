"""A run in stores that check conditions in other ways than S3: Google Cloud by generations, Azure by its own entity tags."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cloud_servers import Cloud, cloud_server
from support.object_servers import local_bucket
from support.remote_runs import copied
from support.toys import TracingRunner

from danling.cli.main import main


@pytest.fixture(params=["google", "azure"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with cloud_server(request.param) as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        yield cloud


def lose_a_machine(root: Path, url: str, backend: str) -> None:
    """Train, empty the disk, and train on."""
    with TracingRunner(settings(root, url, backend=backend)) as runner:
        runner.train()
    shutil.rmtree(root)
    with TracingRunner(settings(root, url, backend=backend, steps=6)) as runner:
        assert runner.state.train.global_step == 4
        runner.train()


def settings(root: Path, url: str, *, backend: str, **changes: Any) -> dict[str, Any]:
    return copied(root, url, checkpoint={"backend": backend, "interval": 2}, **changes)


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_a_run_goes_on_from_an_empty_disk(
    backend: str, cloud: Cloud, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "danling"):
        lose_a_machine(tmp_path, cloud.url, backend)
    assert "does not keep two writers apart" not in caplog.text
    latest = "latest.pth.sha256" if backend == "file" else "latest"
    assert len([key for key in cloud.objects if key.endswith(f"checkpoints/{latest}")]) == 1
    assert not [key for key in cloud.objects if "/lock" in key]


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_run_resumes_on_a_server_without_if_match(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with local_bucket(tmp_path / "server") as server, caplog.at_level(logging.WARNING, "danling"):
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        bucket = server.make_bucket()
        lose_a_machine(tmp_path / "machine", f"s3://{bucket}/runs", backend)
        keys = server.objects(bucket)
    assert caplog.text.count("ignores the condition If-Match") == 2, "once at each start"
    assert any("/checkpoints/latest" in key for key in keys) and not [
        key for key in keys if "/lock" in key
    ]


def test_the_examination_finds_no_fault(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--remote", cloud.url]) == 0
    said = capsys.readouterr().out
    assert "If-None-Match, If-Match: one process writes a run" in said
    assert not cloud.objects
