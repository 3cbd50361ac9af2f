"""SIGKILL at random instants, again and again, also inside saves: what is found afterwards is whole, and the end is the same."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.job import Job
from support.kill import python
from support.locks import child, wait_for
from support.processes import free_port
from support.saves import KINDS, go_on, load, make_manager, record_saves

from danling.checkpoints import CheckpointSettings, FileCheckpointManager
from danling.distributed import LocalDomain

KILLS = int(os.environ.get("DANLING_KILLS", "3"))
STEPS = 50 * KILLS  # of 20 ms and more: longer than all attempts that are killed together
SCRIPT = f"""
import sys, torch
from torch import distributed as dist
from danling.distributed import Domain
from danling.checkpoints import CheckpointSettings, FileCheckpointManager, TorchDistributedCheckpointManager

def main(kind, mode, world_size):
    if world_size > 1:
        dist.init_process_group("gloo")
    manager = (FileCheckpointManager if kind == "file" else TorchDistributedCheckpointManager)(
        "checkpoints", domain=Domain(), run_id="run", settings=CheckpointSettings(async_mode=mode, keep_latest_k=3), step_mode=True
    )
    weights, step = torch.ones(50_000, dtype=torch.float64), 0
    source = manager.find_latest()
    if source is not None:
        loaded = manager.load_checkpoint(source)
        manager.begin(source)
        weights, step = loaded["model"]["w"], loaded["state"]["step"]
        assert loaded["state"]["digest"] == float(weights.sum()), "weights and step of different saves"
    while step < {STEPS}:
        __import__('time').sleep(0.02)
        step += 1
        weights.mul_(1.01).add_(step).sin_()
        payload = dict(format_version=1, model=dict(w=weights), state=dict(step=step, digest=float(weights.sum())))
        manager.save_checkpoint(payload, epoch=0, global_step=step, history=step % 5 == 0, best=step % 7 == 0)
        if manager.domain.rank == 0:
            open("progress", "w").write(str(step))
    manager.wait()
    manager.close()
    if world_size > 1:
        dist.destroy_process_group()

main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


def _expected() -> torch.Tensor:
    weights = torch.ones(50_000, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        weights.mul_(1.01).add_(step).sin_()
    return weights


@contextlib.contextmanager
def _started(kind: str, mode: str, world_size: int) -> Iterator[list[Job]]:
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        jobs = []
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            variables["PYTHONPATH"] = os.pathsep.join(
                [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
            )
            jobs.append(stack.enter_context(python("run.py", kind, mode, str(world_size), environment=variables)))
        yield jobs


def _kill_while_saving(jobs: list[Job], delay: float) -> None:
    before = Path("progress").read_text() if Path("progress").exists() else ""
    jobs[0].wait_until(lambda: Path("progress").exists() and Path("progress").read_text() != before, 60)
    time.sleep(delay)
    for job in jobs:
        job.kill()
    for job in jobs:
        job.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mode", "world_size"),
    [("file", "disabled", 1), ("file", "async", 1), ("dcp", "disabled", 2), ("dcp", "async", 2)],
)
def test_kill_anywhere(tmp_path: Path, kind: str, mode: str, world_size: int) -> None:
    Path("run.py").write_text(SCRIPT)
    draw = random.Random(f"{kind} {mode}")
    for _ in range(KILLS):
        with _started(kind, mode, world_size) as jobs:
            _kill_while_saving(jobs, draw.uniform(0, 0.3))
    with _started(kind, mode, world_size) as jobs:
        ended = [job.wait(100) for job in jobs]
    assert [end.exit_code for end in ended] == [0] * world_size, "\n".join(end.output for end in ended)
    reader = FileCheckpointManager(
        tmp_path / "checkpoints", domain=LocalDomain(), run_id="run", settings=CheckpointSettings(), step_mode=True
    )
    loaded = reader.load_checkpoint("latest")
    assert loaded["state"]["step"] == STEPS
    assert torch.equal(loaded["model"]["w"], _expected())


def _load_for_ever(kind: str, place: Path, count: Path) -> None:
    manager = make_manager(kind, place)
    while True:
        source = manager.find_latest()
        assert source is not None and load(manager, source) == 3
        with count.open("a") as file:
            file.write("+")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_within_a_load_changes_nothing(kind: str, tmp_path: Path) -> None:
    place, count = record_saves(kind, tmp_path / "checkpoints"), tmp_path / "loads"
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in place.rglob("*") if path.is_file()}
    for number in range(5):
        count.write_text("")
        # The process does nothing but load, so that it is killed within a load, each time after another number of them.
        with child(lambda: _load_for_ever(kind, place, count)):
            wait_for(lambda number=number: count.stat().st_size > number)
    assert {path: (path.stat().st_ino, path.read_bytes()) for path in place.rglob("*") if path.is_file()} == before
    assert go_on(kind, place, 4)[0] == 3
