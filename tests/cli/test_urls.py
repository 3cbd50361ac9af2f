"""Every verb of the command line that looks at runs or checkpoints takes a URL in the place of a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_proxy import fault_proxy
from support.object_servers import ObjectServer
from support.remote_runs import upload_run
from support.toys import TracingRunner

from danling.cli.main import main
from danling.remote.store import open_store
from danling.remote.stored_run import RunLayout

pytest.importorskip("obstore")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directories of a run that has saved files, and of one that has saved shards with another rate."""
    found = {}
    for backend, rate in (("file", 0.1), ("dcp", 0.2)):
        config: dict[str, Any] = {
            "steps": 4,
            "seed": 3,
            "log_interval": 1,
            "workspace_root": str(tmp_path_factory.mktemp(backend)),
        }
        config |= {"dataloader.batch_size": 2, "optim": {"type": "sgd", "lr": rate}}
        config |= {"checkpoint": {"backend": backend, "async_enabled": False, "interval": 2}}
        with TracingRunner(config) as runner:
            runner.train()
            found[backend] = runner.workspace.dir
    return found


@pytest.fixture(params=["moto", "localbucket"])
def server(
    request: pytest.FixtureRequest, moto: ObjectServer, localbucket: ObjectServer
) -> ObjectServer:
    return {"moto": moto, "localbucket": localbucket}[request.param]


def stored(
    server: ObjectServer, trained: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, dict[str, str]]:
    """Copy both runs to a new bucket; return its URL, and that of each run."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    url = f"s3://{server.make_bucket()}/runs"
    layouts = {backend: RunLayout(run.parent.name, run.name) for backend, run in trained.items()}
    for backend, run in trained.items():
        upload_run(run, open_store(url), layouts[backend])
    return url, {backend: f"{url}/{layout.root}" for backend, layout in layouts.items()}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_runs_of_many_machines_are_compared(
    server: ObjectServer,
    trained: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    url, runs = stored(server, trained, monkeypatch)
    code, found = said(capsys, "runs", url)
    assert code == 0 and {row["path"] for row in found["runs"]} == set(runs.values())
    assert [row["step"] for row in found["runs"]] == [4, 4] and [
        row["attempts"] for row in found["runs"]
    ] == [1, 1]
    assert sorted(found["differences"]["optim.lr"].values()) == [0.1, 0.2]
    # One of them, by its own URL.
    assert [row["path"] for row in said(capsys, "runs", runs["file"])[1]["runs"]] == [runs["file"]]
    parted = said(capsys, "diff", *runs.values())
    assert (
        parted[1]["settings"]
        == said(capsys, "diff", *map(str, trained.values()))[1]["settings"]
        != {}
    )
    assert main(["plot", url, "--output", str(tmp_path / "curves.png")]) == 0


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_a_checkpoint_is_inspected_verified_and_exported(
    backend: str,
    server: ObjectServer,
    trained: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    _, runs = stored(server, trained, monkeypatch)
    run = runs[backend]
    code, found = said(capsys, "inspect", run, "--config")
    _, local = said(capsys, "inspect", str(trained[backend]), "--config")
    assert code == 0 and found.pop("path") == run and local.pop("path") and found == local
    code, found = said(capsys, "verify", run)
    _, local = said(capsys, "verify", str(trained[backend]))
    assert code == 0 and len(found["checkpoints"]) == len(local["checkpoints"]) >= 2
    assert main(["export", f"{run}/checkpoints/latest", str(tmp_path / "weights.pth")]) == 0
    assert main(["export", str(trained[backend]), str(tmp_path / "local.pth")]) == 0
    weights, same = (torch.load(tmp_path / name) for name in ("weights.pth", "local.pth"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    # A flipped byte is named, and not exported.
    bucket, prefix = run.removeprefix("s3://").split("/", 1)
    sizes = server.objects(bucket, f"{prefix}/checkpoints/")
    largest = max(
        (key for key in sizes if "/objects/" in key or key.endswith(".distcp")),
        key=lambda key: (sizes[key], key),
    )
    server.flip(bucket, largest)
    code, found = said(capsys, "verify", run)
    named = [problem for verdict in found["checkpoints"] for problem in verdict["problems"]]
    assert code == 1 and named and all(problem.split()[0] in largest for problem in named)
    assert said(capsys, "verify", run, "--level", "size")[0] == 0


def test_doctor_tries_a_store_and_leaves_nothing(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket = server.make_bucket()
    code, found = said(capsys, "doctor", "--remote", f"s3://{bucket}/prefix")
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert code == 0 and list(states) == ["objects", "conditions", "clock"]
    assert {name for name, state in states.items() if state != "ok"} == (
        {"conditions"} if server.kind == "localbucket" else set()
    )
    assert server.objects(bucket) == {}
    if server.kind == "moto":
        assert server.unfinished_uploads(bucket) == 0


def test_doctor_names_the_denied_operation(
    moto: ObjectServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = moto.make_bucket()
    with fault_proxy(moto.endpoint) as proxy:
        for name, value in moto.environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        proxy.answer(403, "AccessDenied", when=lambda request: request.is_listing)
        code, found = said(capsys, "doctor", "--remote", f"s3://{bucket}")
        failed = {
            check["name"]: check["detail"]
            for check in found["checks"]
            if check["state"] == "failed"
        }
        assert code == 1 and list(failed) == ["objects"] and "AccessDenied" in failed["objects"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("runs", "ftp://bucket/prefix"), 1, "Expected the URL of an object store"),
        (("inspect", "s3://bucket"), 3, "Expected the URL of a run"),
        (("verify", "file:///nowhere/at/all"), 3, "none"),
        (("runs", "file:///tmp/danling-none-there"), 3, "Expected runs below"),
        (("export", "file:///nowhere/at/all", "w.pth"), 3, "Expected a checkpoint at"),
    ],
)
def test_a_wrong_url_is_one_line(
    words: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = tuple(
        word.replace("/nowhere", str(tmp_path)).replace(
            "/tmp/danling-none-there", str(tmp_path / "none")
        )
        for word in words
    )
    assert main(words) == code
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1
