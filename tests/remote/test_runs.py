"""Runs whose saves go to an object store: what a user sees of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fault_proxy import FaultProxy
from support.object_servers import ObjectServer
from support.warm import interpreter
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.remote.store import RemoteError


class Toy(dl.TorchRunner):
    """Eight updates an epoch."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(64, 3, generator=generator), torch.randint(2, (64,), generator=generator)
        )
        self.datasets = {"train": data, "val": data}
        self.model = nn.Linear(3, 2)
        self.criterion = nn.CrossEntropyLoss()


def config(url: str | None, root: Path, **changes: Any) -> dl.RunnerConfig:
    made = dl.RunnerConfig(
        epochs=3, seed=1, dataloader={"batch_size": 8}, optim={"type": "sgd", "lr": 0.1}
    )
    made.merge(
        {
            "checkpoint.remote.url": url,
            "checkpoint.remote.retries": 0,
            "workspace_root": str(root),
            **changes,
        }
    )
    return made


def test_copy_equals_the_run_directory(
    moto: ObjectServer, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"checkpoint.keep_latest_k": 1, "log_interval": 1}
    with caplog.at_level("INFO", "danling"), Toy(config(url, tmp_path, **settings)) as runner:
        runner.train()
        place = runner.workspace.dir
    bucket = url.split("/")[2]
    prefix = f"runs/{place.relative_to(tmp_path).as_posix()}/"
    there = {key.removeprefix(prefix) for key in moto.objects(bucket, prefix)}
    names = {key for key in there if key.endswith(".sha256")}
    assert names == {
        f"checkpoints/{name}.pth.sha256"
        for name in ("latest", "best", *(f"ckpt-e00000{n}" for n in (1, 2, 3)))
    }
    latest = (place / "checkpoints" / "latest.pth.sha256").read_bytes()
    assert moto.read(bucket, f"{prefix}checkpoints/latest.pth.sha256") == latest
    for file in ("metrics.jsonl", "results.json", "best.json", "metadata/config.full.yaml"):
        assert moto.read(bucket, f"{prefix}files/{file}") == (place / file).read_bytes()
    assert "lock" not in there and moto.unfinished_uploads(bucket) == 0
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    lags = [line["remote/lag_steps"] for line in lines if "remote/lag_steps" in line]
    assert lags[0] == 1 and max(lags) <= 24 and any("remote/bytes" in line for line in lines)
    assert "Step 24 is safe in" in caplog.text


class DecidesLate(Toy):
    """Sets or unsets the place of the copy in its own `__init__`."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        self.config.checkpoint.remote.url = self.config.late_url


@pytest.mark.parametrize("is_copied", [True, False])
def test_store_that_init_of_the_program_sets_is_followed(
    moto: ObjectServer, url: str, tmp_path: Path, is_copied: bool
) -> None:
    early, late = (None, url) if is_copied else (url, None)
    with DecidesLate(config(early, tmp_path, late_url=late, steps=2, epochs=None)) as runner:
        runner.train()
        place = runner.workspace.dir
    keys = moto.objects(url.split("/")[2], f"runs/{place.relative_to(tmp_path).as_posix()}/")
    assert any("checkpoints/latest" in key for key in keys) == is_copied


def test_another_store_that_init_of_the_program_names_is_the_only_one_written(
    tmp_path: Path,
) -> None:
    """Also where the seed was looked up in the store of the configuration before."""
    early, late = f"file://{tmp_path}/early", f"file://{tmp_path}/late"
    more = {"late_url": late, "steps": 2, "epochs": None, "seed": None, "auto_resume": True}
    with DecidesLate(config(early, tmp_path / "runs", **more)) as runner:
        runner.train()
    assert not list((tmp_path / "early").rglob("*.pth*"))
    assert list((tmp_path / "late").rglob("latest.pth*"))


def test_the_copy_changes_no_bit_of_the_result_and_no_id(url: str, tmp_path: Path) -> None:
    weights, ids = [], []
    for place, named in (("with", url), ("without", None)):
        with Toy(
            config(
                url,
                tmp_path / place,
                **{"checkpoint.remote.url": named, "checkpoint.remote.retries": 5},
            )
        ) as runner:
            runner.train()
            weights.append([parameter.detach().clone() for parameter in runner.model.parameters()])
            ids.append(runner.id)
    assert ids[0] == ids[1] and all(torch.equal(a, b) for a, b in zip(*weights))


def test_credentials_of_the_hook_are_used(url: str, tmp_path: Path) -> None:
    asked: list[int] = []

    class Renewing(Toy):
        def remote_credentials(self) -> dict[str, Any]:
            asked.append(1)
            return {
                "access_key_id": "key",
                "secret_access_key": "secret",
                "token": None,
                "expires_at": None,
            }

    with Renewing(config(url, tmp_path)) as runner:
        runner.train()
    assert asked


def test_busy_store_at_the_start_is_retried_with_one_line(
    proxy: FaultProxy, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Toy(config(url, tmp_path / "one")) as runner:
        runner.train()
    # On another machine, so that the resume begins in the store.
    busy = proxy.answer(503, "SlowDown")
    healing = threading.Timer(2.0, proxy.heal)
    healing.start()
    with (
        caplog.at_level("INFO", "danling"),
        Toy(config(url, tmp_path / "two", epochs=4, auto_resume=True)) as again,
    ):
        again.train()
        assert again.state.train.global_step == 32
    healing.join()
    told = [
        record.message
        for record in caplog.records
        if "is asked again for up to 30 s" in record.message
    ]
    assert busy.hit >= 2 and len(told) == 1 and "503" in told[0]


def test_workers_are_forked_while_an_upload_runs(
    proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    fault = proxy.hold(when=lambda request: request.is_upload and "/objects/" in request.path)

    class Held(Toy):
        def train_epoch(self, split: str = "train") -> dict[str, float]:
            if self.state.train.epoch:
                assert fault.came.wait(60)
            if self.state.train.epoch == 2:
                fault.release()
            return dict(super().train_epoch(split))

    with Held(config(url, tmp_path, **{"dataloader.num_workers": 2})) as runner:
        runner.train()
        assert runner.state.train.global_step == 24
    assert fault.hit


def test_run_without_a_store_loads_no_client_and_starts_no_thread(tmp_path: Path) -> None:
    script = f"""
import sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
sys.modules["obstore"] = None
from remote.test_runs import Toy, config
with Toy(config(None, Path({str(tmp_path)!r}))) as runner:
    runner.train()
    assert not [thread.name for thread in threading.enumerate() if thread.name in ("danling-remote", "danling-lease")]
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_failure_of_a_required_store_ends_the_training(
    proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    runner = Toy(config(url, tmp_path, **{"checkpoint.remote.required": True, "epochs": 200}))
    proxy.answer(403, "ExpiredToken", when=lambda request: request.is_upload)
    with pytest.raises(RemoteError):
        runner.train()
    assert 0 < runner.state.train.global_step < 1600
    with pytest.raises(RemoteError):
        runner.close()


def test_settings_are_checked_before_anything_begins(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to be a number >= 5242880"):
        Toy(config("s3://bucket", tmp_path, **{"checkpoint.remote.part_size": 1000}))
    with pytest.raises(ValueError, match=r"checkpoint\.remote\.url to be unset with ft\.enabled"):
        Toy(config("s3://bucket", tmp_path, **{"ft.enabled": True, "stack": "ddp"}))


def test_machines_without_a_common_disk_number_their_runs_as_one(url: str, tmp_path: Path) -> None:
    def begin(machine: str, **changes: Any) -> tuple[str, int]:
        with Toy(config(url, tmp_path / machine, **{"epochs": 1, **changes})) as runner:
            begun = runner.state.train.global_step
            runner.train()
            return runner.workspace.dir.name, begun

    first, _ = begin("a")
    assert begin("b") == (f"{first}-2", 0), "what another machine has begun is not written over"
    assert begin("a", epochs=2, auto_resume=True) == (f"{first}-2", 8), (
        "the newest is gone on in, wherever it was"
    )
    assert begin("c", epochs=3, auto_resume=True) == (f"{first}-2", 16)
    assert begin("a") == (f"{first}-3", 0)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from remote.test_runs import Toy, config

with Toy(config({url!r}, Path({root!r}), **{{"epochs": {epochs}, "checkpoint.remote.timeout_seconds": 6.0}})) as runner:
    print("begins", flush=True)
    sys.stdin.readline()
    runner.train()
    print("ended at", runner.state.train.global_step, flush=True)
"""


# Where a training ends by itself, the interpreter's own end has the last word; a signal is no failure.
@pytest.mark.parametrize(("epochs", "code"), [(40, 1), (4000, 143)])
def test_exit_code_reports_a_missing_last_save(
    epochs: int, code: int, proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    script = SCRIPT.format(
        tests=str(Path(__file__).parents[1]), url=url, root=str(tmp_path), epochs=epochs
    )
    python = sys.executable if code == 1 else interpreter()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    program = subprocess.Popen([python, "-c", script], text=True, **pipes)
    assert program.stdin is not None and program.stdout is not None and program.stderr is not None
    assert program.stdout.readline() == "begins\n"
    proxy.answer(403, "ExpiredToken", when=lambda request: request.is_upload)
    program.stdin.write("\n")
    program.stdin.flush()
    errors = ""
    if code == 143:
        while "is not safe in" not in errors:
            line = program.stderr.readline()
            assert line, errors
            errors += line
        program.terminate()
    out, rest = program.communicate(timeout=120)
    errors += rest
    assert program.returncode == code and ("ended at 320" in out) == (code == 1)
    assert "Expected the last save in s3://" in errors and "is not safe in" in errors
    assert ("Traceback" in errors) == (code == 1)
