"""What is wrong with a store is told in one line before training begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.object_servers import ObjectServer
from support.remote_runs import copied, upload_run
from support.toys import TracingRunner

from danling.checkpoints import CheckpointError, CheckpointMismatch
from danling.cli.main import main
from danling.remote.store import RemoteDenied, RemoteError, RemoteMissing, open_store
from danling.remote.stored_run import RunLayout


def settings(root: Path, url: str, **changes: Any) -> dict[str, Any]:
    return copied(root, url, checkpoint={"async_enabled": False}, **changes)


@pytest.fixture
def bucket(moto: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in moto.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return moto.make_bucket()


def refusal(config: dict[str, Any], kind: type[CheckpointError]) -> str:
    """Return the one line by which a run is refused before it trains."""
    with pytest.raises(kind) as found:
        TracingRunner(config)
    said = str(found.value)
    assert "\n" not in said and said.startswith("Expected") and said.endswith(".")
    return said


@pytest.mark.parametrize("url", ["ftp://bucket/prefix", "s3://", "bucket/prefix", "s3:/bucket"])
def test_an_unknown_scheme(url: str, tmp_path: Path) -> None:
    said = refusal(settings(tmp_path, url), RemoteError)
    assert "s3://bucket/prefix, gs://" in said and repr(url) in said


def test_a_directory_without_its_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    mend = f"Give file://{tmp_path}/runs/here"
    said = refusal(settings(tmp_path, "file://runs/here"), RemoteError)
    assert "file:///abs/path" in said and mend in said
    for setting in ("resume", "pretrained"):
        config = settings(tmp_path, "") | {
            "checkpoint": {},
            "auto_resume": False,
            setting: "file://runs/here/line/id",
        }
        said = refusal(config, RemoteError)
        assert "file:///abs/path" in said and f"{mend}/line/id" in said
    assert main(["runs", "file://runs/here"]) == 1 and mend in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code", "operation", "words"),
    [
        (403, "AccessDenied", "list", ("to list", "AccessDenied", "remote_credentials()")),
        (403, "AccessDenied", "put", ("to put", "AccessDenied", "remote_credentials()")),
        (400, "ExpiredToken", "", ("ExpiredToken", "remote_credentials()")),
        (403, "RequestTimeTooSkewed", "", ("The clock of this machine is off: set it",)),
    ],
)
def test_refusing_store_is_named(
    status: int,
    code: str,
    operation: str,
    words: tuple[str, ...],
    bucket: str,
    proxy: FaultProxy,
    tmp_path: Path,
) -> None:
    is_refused = {
        "list": lambda request: request.is_listing,
        "put": lambda request: request.is_upload,
    }
    proxy.answer(status, code, when=is_refused.get(operation, lambda request: True))
    said = refusal(settings(tmp_path, f"s3://{bucket}"), RemoteDenied)
    assert all(word in said for word in words)
    proxy.heal()
    said = refusal(settings(tmp_path, "s3://there-is-no-such-bucket"), RemoteMissing)
    assert "NoSuchBucket" in said and "Make the bucket" in said


def test_unreachable_store_is_named(
    monkeypatch: pytest.MonkeyPatch, moto: ObjectServer, tmp_path: Path
) -> None:
    monkeypatch.setattr("danling.remote.store.STARTING_SECONDS", 1.0)
    for name, value in moto.environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    assert "Look whether the store can be reached" in refusal(
        settings(tmp_path, "s3://bucket"), RemoteError
    )


def test_a_prefix_of_another_run(bucket: str, tmp_path: Path) -> None:
    with TracingRunner(
        settings(tmp_path / "other", f"s3://{bucket}/other") | {"seed": 4}
    ) as runner:
        runner.train()
        other = runner.workspace.dir
    config = settings(tmp_path / "own", f"s3://{bucket}")
    with TracingRunner(config | {"checkpoint": {}}) as runner:
        own = runner.workspace.dir
    # As if a user had copied the objects of one run to the place of the other.
    upload_run(other, open_store(f"s3://{bucket}"), RunLayout(own.parent.name, own.name))
    said = refusal(config | {"workspace_root": str(tmp_path / "empty")}, CheckpointMismatch)
    assert f"s3://{bucket}/{own.parent.name}" in said


def test_start_from_scratch_leaves_the_existing_run_alone(
    bucket: str, moto: ObjectServer, tmp_path: Path
) -> None:
    with TracingRunner(settings(tmp_path / "first", f"s3://{bucket}")) as runner:
        runner.train()
        name = runner.workspace.dir.name
    before = moto.objects(bucket)
    with TracingRunner(
        settings(tmp_path / "second", f"s3://{bucket}", auto_resume=False)
    ) as runner:
        assert runner.state.train.global_step == 0 and runner.workspace.dir.name == f"{name}-2"
        runner.train()
    after = moto.objects(bucket)
    assert before.items() <= after.items() and any(f"/{name}-2/" in key for key in after)


def test_invalid_url_to_resume_from_is_refused(bucket: str, tmp_path: Path) -> None:
    config = settings(tmp_path, "") | {"checkpoint": {}, "auto_resume": False}
    assert "Expected the URL of a run" in refusal(
        config | {"resume": f"s3://{bucket}"}, CheckpointError
    )
    assert "Received: none" in refusal(
        config | {"resume": f"s3://{bucket}/family/run"}, CheckpointError
    )
    weights = {"pretrained": f"s3://{bucket}/weights.safetensors"}
    assert "weights.safetensors" in refusal(config | weights, RemoteMissing)
