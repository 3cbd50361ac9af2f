"""What a run writes down: no secret, nothing that the umask forbids; and nothing where a checkpoint says."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.processes import run_processes
from support.stacks import AnyStackRunner, needs_deepspeed, zero
from support.stacks import settings as engine_settings
from support.toys import Small
from support.toys import settings as toy_settings

import danling as dl
from danling.checkpoints.directory import newest_record
from danling.checkpoints.file_store import FileStore

SECRETS = {
    "hub": {"token": "hf-TOPSECRET-0001", "user": "ann"},
    "api_key": "TOPSECRET-0002",
    "service": {
        "credentials": {"user": "TOPSECRET-0003", "port": 443},
        "db_password": "TOPSECRET-0004",
    },
    "dataset": {
        "sources": [{"url": "s3://data", "access_token": "TOPSECRET-0005"}],
        "signing": "TOPSECRET-0006",
    },
    "secret_keys": ["dataset.signing"],
}
KEPT = {"pad_token_id": 7, "num_tokens": "many", "tokenizer": "bert-base"}


class Reading(Small):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own = [
            self.config.get(name, None)
            for name in ("hub", "api_key", "service", "dataset", "model")
        ]


def settings(**more: Any) -> dict[str, Any]:
    return {**toy_settings("unused", epochs=1, log=True), "dir": None, **more}


def trained(config: Any) -> Path:
    with Reading(config) as runner:
        runner.train()
        return runner.dir


def files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


def holders(root: Path, text: str) -> list[str]:
    return [
        str(path.relative_to(root)) for path in files(root) if text.encode() in path.read_bytes()
    ]


def run_with_secrets(backend: str) -> str:
    sys.argv[1:] = ["--hub.token", "hf-TOPSECRET-0001"]
    more = {
        "wandb": {"enabled": backend == "file", "mode": "offline"},
        "tensorboard": True,
        "model": KEPT,
    }
    checkpoint = {"backend": backend, "last_save_model_only": True}
    return str(trained(settings(dir="mine", checkpoint=checkpoint, **more, **SECRETS)))


@pytest.mark.parametrize("backend", ["file", "dcp"])
def test_no_secret_is_written_anywhere_and_other_text_stays(backend: str) -> None:
    pytest.importorskip("wandb")
    run = Path(run_processes(run_with_secrets, backend, world_size=1)[0])
    assert (run / "wandb").is_dir() == (backend == "file")
    assert holders(run, "TOPSECRET") == []
    full = yaml.safe_load((run / "metadata" / "config.full.yaml").read_text())
    assert full["model"] == KEPT
    assert full["hub"] == {"user": "ann"}
    assert full["service"] == {"credentials": {"port": 443}}
    assert full["dataset"] == {"sources": [{"url": "s3://data"}]}
    assert dl.TorchRunner.read_config(run)["model"] == KEPT


def test_a_new_token_makes_no_other_run_and_comes_from_the_new_configuration() -> None:
    one, two = (
        dl.RunnerConfig(settings(hub={"token": token}, model=KEPT))
        for token in ("first-token", "second-token")
    )
    assert (
        one.config_id()
        == two.config_id()
        == dl.RunnerConfig(settings(hub={"user": None}, model=KEPT) | {"hub": {}}).config_id()
    )
    assert (
        one.config_id()
        != dl.RunnerConfig(settings(model={**KEPT, "tokenizer": "other"})).config_id()
    )
    run = trained(one)
    two.epochs, two.auto_resume = 2, True
    with Reading(two) as runner:
        assert (runner.dir, runner.state.train.epoch, runner.config.hub.token) == (
            run,
            1,
            "second-token",
        )
    latest = run / "checkpoints" / "latest.pth"
    with Reading.from_checkpoint(latest, {"hub": {"token": "third-token"}}) as runner:
        assert runner.config.hub.token == "third-token"
    with Reading.from_checkpoint(latest, two) as runner:
        assert runner.config.hub.token == "second-token"


def test_the_umask_holds_for_every_file() -> None:
    mask = 0o027
    more = {
        "tensorboard": True,
        "heartbeat": {"enabled": True},
        "profiling": {"enabled": True, "wait": 0, "warmup": 0, "active": 1},
    }
    before = os.umask(mask)
    try:
        run = trained(settings(dir="files", checkpoint={"async_enabled": False}, **more))
        run_dcp = trained(settings(dir="dcp", checkpoint={"backend": "dcp"}))
    finally:
        os.umask(before)
    for path in [*run.rglob("*"), *run_dcp.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, (path, oct(mode))


def git(*words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.email=a@b.c", "-c", "user.name=n", *words],
        check=True,
        capture_output=True,
    )


def test_the_diff_leaves_secrets_out_and_can_be_turned_off() -> None:
    Path("train.py").write_text("width = 4\n")
    Path(".env").write_text("PLAIN=1\n")
    git("init", "-q", ".")
    git("add", "-A")
    git("commit", "-qm", "first")
    Path("train.py").write_text(
        'width = 8\nhub_token = "TOPSECRET-0011"\nlogin("TOPSECRET-0012")\n'
    )
    Path(".env").write_text("PLAIN=1\nANYTHING=TOPSECRET-0013\n")
    Path("new.py").write_text('client(api_key="TOPSECRET-0014")\n')
    git("add", "new.py")
    run = trained(settings(dir="mine", api_key="TOPSECRET-0012"))
    assert holders(run, "TOPSECRET") == []
    patch = run / "metadata" / "git.diff"
    assert "+width = 8" in patch.read_text()
    assert yaml.safe_load((run / "metadata" / "git.yaml").read_text())["lines_left_out"] == 5
    git("stash")
    git(
        "apply", "--check", "--exclude=.env", str(patch.resolve())
    )  # what is left can still be applied
    git("stash", "pop")
    run = trained(settings(dir="other", git_diff=False))
    assert not (run / "metadata" / "git.diff").exists()
    assert (run / "metadata" / "git.yaml").is_file()


def test_a_checkpoint_in_the_directory_of_its_run_goes_on_there() -> None:
    named, usual = trained(settings(dir="mine")), trained(settings())
    for run in (named, usual):
        with Reading.from_checkpoint(run / "checkpoints" / "latest.pth", {"epochs": 2}) as runner:
            assert runner.dir == run
            runner.train()
    # Without a seed of its own, the id is that of a run whose seed was drawn.
    drawn = trained(settings(seed=None))
    with Reading.from_checkpoint(drawn, {"epochs": 2}) as runner:
        assert runner.dir == drawn
    # Moved as a whole, it is the directory of its run still.
    shutil.move(named, "moved")
    with Reading.from_checkpoint("moved", {"epochs": 3}) as runner:
        assert runner.dir == Path("moved").resolve()


def test_copy_writes_into_a_new_directory_and_not_into_the_old_one() -> None:
    run = trained(settings(dir="mine", log_file="mine.log", lineage="ours"))
    before = {path: path.read_bytes() for path in [*files(run), Path("mine.log")]}
    Path("downloads").mkdir()
    for name in ("latest.pth", "latest.pth.sha256"):
        shutil.copy(run / "checkpoints" / name, "downloads")
    with Reading.from_checkpoint("downloads/latest.pth", {"epochs": 2}) as runner:
        runner.train()
        assert runner.dir.parent == Path("experiments/ours").resolve()
    assert {path: path.read_bytes() for path in [*files(run), Path("mine.log")]} == before
    with Reading.from_checkpoint("downloads/latest.pth", {"epochs": 2, "dir": "chosen"}) as runner:
        assert runner.dir == Path("chosen").resolve()


HOSTILE = {
    "dir": "evil/dir",
    "checkpoint_dir": "evil/checkpoints",
    "log_file": "evil/log",
    "workspace_root": "evil/root",
    "lineage": "../../evil/lineage",
    "init_method": "file://evil/rendezvous",
    "wandb": {"dir": "evil/wandb"},
    "profiling": {
        "enabled": True,
        "wait": 0,
        "warmup": 0,
        "active": 1,
        "trace_dir": "/EVIL/traces",
    },
    "heartbeat": {"enabled": True, "dir_name": "../../../evil/heartbeats"},
    "checkpoint": {"dir_name": "../../../evil/names"},
}


def test_places_in_a_crafted_checkpoint_are_not_obeyed(tmp_path: Path) -> None:
    hostile = {
        **HOSTILE,
        "profiling": {**HOSTILE["profiling"], "trace_dir": str(tmp_path / "evil" / "traces")},
    }  # type: ignore[dict-item]
    run = trained(settings(dir="mine"))
    Path("sent").mkdir()
    payload = torch.load(run / "checkpoints" / "latest.pth", weights_only=True)
    payload["runner"].update(
        {**hostile, "checkpoint": {**payload["runner"]["checkpoint"], **hostile["checkpoint"]}}
    )
    record = newest_record(run / "checkpoints")
    assert record is not None
    store = FileStore(Path("sent"))
    with store.publishing([replace(record, name="latest")]) as writer:
        torch.save(payload, writer)  # type: ignore[arg-type]
    with Reading.from_checkpoint("sent/latest.pth", {"epochs": 2}) as runner:
        runner.train()
        assert runner.dir.parent == Path("experiments/lin").resolve()
        assert (runner.dir / "heartbeats").is_dir()
    assert [path for path in Path().rglob("*") if "evil" in str(path).lower()] == []


def run_an_engine(root: str) -> str:
    engine = {**zero(1), "comet": {"enabled": False, "api_key": "TOPSECRET-0021"}}
    with AnyStackRunner(engine_settings(root, deepspeed=engine)) as runner:
        runner.train()
        return str(runner.dir)


@needs_deepspeed
def test_the_checkpoints_of_an_engine_hold_no_secret(tmp_path: Path) -> None:
    run = Path(run_processes(run_an_engine, tmp_path, world_size=1)[0])
    assert list((run / "checkpoints" / "targets").rglob("*.pt"))
    assert holders(run, "TOPSECRET") == []
