"""Saves of several processes: each uploads its own files, and the save becomes visible when all are there."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.object_servers import ObjectServer
from support.processes import run_processes
from support.stacks import AnyStackRunner, needs_deepspeed
from support.toys import TracingRunner, differences

from danling import RunnerConfig
from danling.checkpoints.manager import Saved
from danling.checkpoints.manifest import Manifest, Record
from danling.checkpoints.target_store import TargetStore
from danling.remote.attach import RemoteStores
from danling.remote.mirror import RunMirror
from danling.remote.store import RemoteError, RemoteSettings, open_store
from danling.remote.stored_run import RunLayout, StoredRun

LAYOUT = RunLayout("line", "run")
FILES = {0: ["__0_0.distcp", ".metadata", "index.json"], 1: ["__1_0.distcp"]}


def write_target(directory: Path, sequence: int, names: tuple[str, ...]) -> list[Saved]:
    """Write a target as two ranks would, and return what each of them tells its mirror."""
    name = f"{sequence:08d}-{sequence:08x}"
    target = directory / "targets" / name
    target.mkdir(parents=True)
    sums = {}
    for file in (*FILES[0], *FILES[1]):
        content = f"{file} of {sequence}".encode() * 100
        (target / file).write_bytes(content)
        sums[file] = (len(content), hashlib.sha256(content).hexdigest())
    record = Record(name, sequence, 0, (), "run", sequence, 0)
    (target / "manifest.sha256").write_text(Manifest(record, sums).text())
    return [Saved(sequence, sequence, names, name, tuple(FILES[rank])) for rank in (0, 1)]


def two_mirrors(url: str, directory: Path) -> list[RunMirror]:
    store = open_store(url, settings=RemoteSettings(retries=0, timeout_seconds=20.0))
    managers: list[Any] = [
        SimpleNamespace(
            domain=SimpleNamespace(rank=rank, size=2), directory=directory, store_class=TargetStore
        )
        for rank in (0, 1)
    ]
    settings = RunnerConfig().checkpoint.remote
    return [
        RunMirror(StoredRun(store, LAYOUT), manager, directory / "run", settings)
        for manager in managers
    ]


def test_a_target_counts_when_the_files_of_all_ranks_are_there(
    moto: ObjectServer, proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    first, second = two_mirrors(url, tmp_path)
    bucket, prefix = url.split("/")[2], f"runs/{LAYOUT.checkpoints}/"
    of_first, of_second = write_target(tmp_path, 1, ("ckpt-s000000000001", "latest"))
    first.saved(of_first)
    first.wait(0.5)
    there = {key.removeprefix(prefix) for key in moto.objects(bucket, prefix)}
    assert there == {f"targets/{of_first.target}/{file}" for file in FILES[0]}
    second.saved(of_second)
    second.close()
    first.close()
    there = {key.removeprefix(prefix) for key in moto.objects(bucket, prefix)}
    assert {"latest", "ckpt-s000000000001", f"targets/{of_first.target}/manifest.sha256"} <= there
    assert moto.read(bucket, f"{prefix}latest").decode() == f"{of_first.target}\n"
    for file in (*FILES[0], *FILES[1]):
        content = (tmp_path / "targets" / str(of_first.target) / file).read_bytes()
        assert moto.read(bucket, f"{prefix}targets/{of_first.target}/{file}") == content
    # The manifest goes before the pointers, and after all else.
    puts = [
        request.path.rpartition("/")[2] for request in proxy.requests if request.method == "PUT"
    ]
    assert puts[-3:] == ["manifest.sha256", "ckpt-s000000000001", "latest"] and len(puts) == 3 + 4


def test_files_of_a_rank_ahead_are_not_removed(
    moto: ObjectServer, url: str, tmp_path: Path
) -> None:
    first, second = two_mirrors(url, tmp_path)
    bucket, prefix = url.split("/")[2], f"runs/{LAYOUT.checkpoints}/targets/"
    for sequence in (1, 2):
        for mirror, saved in zip(
            (second, first), reversed(write_target(tmp_path, sequence, ("latest",)))
        ):
            mirror.saved(saved)
            mirror.wait()
    of_first, of_second = write_target(tmp_path, 3, ("latest",))
    second.saved(of_second)
    second.wait()
    first.run.forget()
    first._sweep(2, ())
    targets = {
        key.removeprefix(prefix).split("/")[0] for key in moto.objects(bucket, prefix.rstrip("/"))
    }
    assert targets == {"00000002-00000002", str(of_second.target)}
    first.saved(of_first)
    first.close(), second.close()


def settings(root: str, url: str | None, **changes: Any) -> dict[str, Any]:
    return {
        "steps": 8,
        "dataloader": {"batch_size": 2, "drop_last": False},
        "optim": {"type": "adamw", "lr": 1e-2},
        "seed": 3,
        "auto_resume": True,
        "workspace_root": root,
        "checkpoint": {"interval": 2, "remote.url": url},
        **changes,
    }


def lose_machine(root: str, url: str, changes: dict[str, Any]) -> list[str]:
    """Train alone, on a machine that is lost, and on an empty one; return the weights and updates that differ at the end."""

    def train(
        place: str, url: str | None, stop_at: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        with AnyStackRunner(settings(f"{root}/{place}", url, **changes), stop_at=stop_at) as runner:
            begun = runner.state.train.global_step
            runner.train()
            weights = runner.unwrapped_model.state_dict()
            whole = {
                name: value.full_tensor() if hasattr(value, "full_tensor") else value
                for name, value in weights.items()
            }
            return begun, {
                "trace": runner.trace[-3:],
                **{name: value.clone() for name, value in whole.items()},
            }

    alone, lost, resumed = train("alone", None), train("lost", url, stop_at=5), train("empty", url)
    assert (lost[0], resumed[0]) == (0, 5)
    return differences(resumed[1], alone[1])


STACKS: dict[str, dict[str, Any]] = {
    "ddp": {"stack": "ddp"},
    "parallel": {"stack": "parallel", "parallel": {"axes": {"shard": 2}}},
    "deepspeed": {"stack": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}}},
}


@pytest.mark.parametrize(
    "stack",
    [
        "parallel",
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("deepspeed", marks=needs_deepspeed),
    ],
)
def test_two_ranks_go_on_bitwise_on_an_empty_machine(
    moto: ObjectServer, proxy: FaultProxy, url: str, tmp_path: Path, stack: str
) -> None:
    assert run_processes(lose_machine, str(tmp_path), url, STACKS[stack], timeout=170.0) == [[], []]
    bucket = url.split("/")[2]
    keys = list(moto.objects(bucket))
    assert not [key for key in keys if "/lock" in key] and moto.unfinished_uploads(bucket) == 0
    of_targets = {key.split("/targets/")[1].split("/")[0] for key in keys if "/targets/" in key}
    complete = {
        key.split("/targets/")[1].split("/")[0] for key in keys if key.endswith("/manifest.sha256")
    }
    assert of_targets == complete and bool(complete) == (stack != "ddp")
    assert any("__1_0.distcp" in key for key in keys) == (stack == "parallel")
    # Both ranks read what their machine has downloaded once.
    read = [
        r.path
        for r in proxy.requests
        if r.method == "GET" and ("/objects/" in r.path or "/targets/" in r.path)
    ]
    read = [path for path in read if not path.endswith(".sha256")]
    assert read and len(read) == len({*read})


def train_in_haste(root: str, url: str) -> int:
    """Train with collectives that fail after two seconds."""
    with AnyStackRunner(
        settings(root, url, stack="ddp", comm={"train_timeout_seconds": 2.0})
    ) as runner:
        runner.train()
        return int(runner.state.train.global_step)


@pytest.mark.slow
def test_ranks_without_an_upload_wait_for_the_uploading_one(
    proxy: FaultProxy, url: str, tmp_path: Path
) -> None:
    fault = proxy.hold(
        when=lambda request: request.is_upload and request.path.endswith("latest.pth.sha256")
    )
    healer = threading.Thread(target=lambda: (fault.came.wait(60), time.sleep(8), fault.release()))
    healer.start()
    assert run_processes(train_in_haste, str(tmp_path), url) == [8, 8]
    healer.join()


def resume_where_the_store_fails(root: str) -> str:
    """Resume another run's checkpoint while the store does not say whether it has a best one, and return how that ended."""
    common: dict[str, Any] = {
        "epochs": 2,
        "seed": 3,
        "dataloader.batch_size": 4,
        "optim.type": "sgd",
        "log": False,
    }
    with TracingRunner({**common, "dir": f"{root}/first"}) as runner:
        runner.train()

    def fails(self: RemoteStores, name: str) -> bool:
        raise RemoteError(f"Expected to list {name}. Received: no answer.")

    RemoteStores.has = fails  # type: ignore[method-assign]
    again = {
        "resume": f"{root}/first/checkpoints/latest.pth",
        "checkpoint.remote.url": f"file://{root}/bucket",
    }
    try:
        with TracingRunner({**common, "dir": f"{root}/second", "epochs": 3, **again}):
            return "resumed"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_store_failing_on_the_main_process_at_a_resume_fails_all_ranks_alike(
    tmp_path: Path,
) -> None:
    told = run_processes(resume_where_the_store_fails, str(tmp_path), world_size=2, timeout=50)
    assert told == ["RemoteError: Expected to list best. Received: no answer."] * 2
