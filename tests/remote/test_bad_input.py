"""What is wrong with a store is told in one line before training begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.object_servers import ObjectServer
from support.remote_runs import upload_run
from support.toys import TracingRunner

from danling.checkpoints import CheckpointError, CheckpointMismatch
from danling.cli.main import main
from danling.remote import RemoteDenied, RemoteError, RemoteMissing, RunLayout, open_store


def settings(root: Path, url: str, **changes: Any) -> dict[str, Any]:
    return {
        "steps": 4,
        "seed": 3,
        "dataloader.batch_size": 2,
        "optim.type": "sgd",
        "auto_resume": True,
        "workspace_root": str(root),
        "checkpoint": {"async_enabled": False, "remote": {"url": url, "retries": 0}},
        **changes,
    }


@pytest.fixture
def bucket(moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in moto.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return moto.make_bucket()


def refused(config: dict[str, Any], kind: type[CheckpointError], *texts: str) -> None:
    with pytest.raises(kind) as found:
        TracingRunner(config)
    said = str(found.value)
    assert "\n" not in said and said.startswith("Expected") and said.endswith(".")
    assert all(text in said for text in texts), said


@pytest.mark.parametrize("url", ["ftp://bucket/prefix", "s3://", "bucket/prefix", "s3:/bucket"])
def test_an_unknown_scheme(url: str, tmp_path: Path) -> None:
    refused(settings(tmp_path, url), RemoteError, "s3://bucket/prefix, gs://", repr(url))


def test_a_directory_without_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    mend = f"Give file://{tmp_path}/runs/here"
    refused(settings(tmp_path, "file://runs/here"), RemoteError, "file:///abs/path", mend)
    for setting in ("resume", "pretrained"):
        config = settings(tmp_path, "") | {"checkpoint": {}, "auto_resume": False, setting: "file://runs/here/line/id"}
        refused(config, RemoteError, "file:///abs/path", f"{mend}/line/id")
    assert main(["runs", "file://runs/here"]) == 1 and mend in capsys.readouterr().err


def test_no_bucket(bucket: str, tmp_path: Path) -> None:
    refused(settings(tmp_path, "s3://there-is-no-such-bucket"), RemoteMissing, "NoSuchBucket", "Make the bucket")


def test_no_right_to_list(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.answer(403, "AccessDenied", when=lambda request: request.is_listing)
    refused(settings(tmp_path, f"s3://{bucket}"), RemoteDenied, "to list", "AccessDenied", "remote_credentials()")


def test_no_right_to_write(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.answer(403, "AccessDenied", when=lambda request: request.is_upload)
    refused(settings(tmp_path, f"s3://{bucket}"), RemoteDenied, "to put", "AccessDenied", "remote_credentials()")


def test_expired_credentials(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.answer(400, "ExpiredToken")
    refused(settings(tmp_path, f"s3://{bucket}"), RemoteDenied, "ExpiredToken", "remote_credentials()")


def test_a_clock_that_is_off(bucket: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.answer(403, "RequestTimeTooSkewed")
    refused(settings(tmp_path, f"s3://{bucket}"), RemoteDenied, "The clock of this machine is off: set it")


def test_a_store_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, moto: ObjectServer, tmp_path: Path) -> None:
    for name, value in moto.environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    refused(settings(tmp_path, "s3://bucket"), RemoteError, "Look whether the store can be reached")


def test_a_prefix_of_another_run(bucket: str, tmp_path: Path) -> None:
    with TracingRunner(settings(tmp_path / "other", f"s3://{bucket}/other", lr=None) | {"seed": 4}) as runner:
        runner.train()
        other = runner.workspace.dir
    config = settings(tmp_path / "own", f"s3://{bucket}")
    with TracingRunner(config | {"checkpoint": {}}) as runner:
        own = runner.workspace.dir
    # Somebody has copied the objects of one run to the place of the other.
    upload_run(other, open_store(f"s3://{bucket}"), RunLayout(own.parent.name, own.name))
    refused(
        config | {"workspace_root": str(tmp_path / "empty")}, CheckpointMismatch, f"s3://{bucket}/{own.parent.name}"
    )


def test_a_start_from_scratch_leaves_the_run_that_is_there_alone(
    bucket: str, moto: ObjectServer, tmp_path: Path
) -> None:
    with TracingRunner(settings(tmp_path / "first", f"s3://{bucket}")) as runner:
        runner.train()
        name = runner.workspace.dir.name
    before = moto.objects(bucket)
    with TracingRunner(settings(tmp_path / "second", f"s3://{bucket}", auto_resume=False)) as runner:
        assert runner.state.train.global_step == 0 and runner.workspace.dir.name == f"{name}-2"
        runner.train()
    after = moto.objects(bucket)
    assert before.items() <= after.items() and any(f"/{name}-2/" in key for key in after)


def test_a_url_to_resume_from_that_is_none(bucket: str, tmp_path: Path) -> None:
    config = settings(tmp_path, "") | {"checkpoint": {}, "auto_resume": False}
    refused(config | {"resume": f"s3://{bucket}"}, CheckpointError, "Expected the URL of a run")
    refused(config | {"resume": f"s3://{bucket}/family/run"}, CheckpointError, "Received: none")
    refused(config | {"pretrained": f"s3://{bucket}/weights.safetensors"}, RemoteMissing, "weights.safetensors")
