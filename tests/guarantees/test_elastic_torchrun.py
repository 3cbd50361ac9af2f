"""G6 without TorchFT: torchrun restarts a group that lost a rank by SIGKILL, and nodes leave and join one job."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.job import Job
from support.processes import free_port
from support.programs import LOOPBACK, run_program, run_python

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl


class Runner(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(1)
        self.datasets = {"train": TensorDataset(torch.randn(40, 4, generator=generator).double(), torch.arange(40) % 2)}

    def step(self):
        if self.is_main_process:
            print(f"after {self.state.train.global_step} updates", flush=True)
        while "GATE" in os.environ and self.state.train.global_step >= int(open(os.environ["GATE"]).read()):
            time.sleep(0.02)
        if str(self.state.train.global_step) == os.environ.get("KILL_AT") and self.rank == self.world_size - 1:
            if self.elastic_state.restart_count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


config = dl.RunnerConfig(seed=1, steps=int(os.environ.get("STEPS", "16")), auto_resume=True, workspace_root=sys.argv[1])
config.optim = {"type": "adamw", "lr": 0.01}
config.scheduler = {"type": "cosine"}
config.dataloader = {"global_batch_size": 10, "drop_last": False}
config.checkpoint = {"interval": 1, "async_enabled": False}
with Runner(config) as runner:
    begun = runner.state.train.global_step
    print(f"rank {runner.rank} of {runner.world_size} begins at {begun}", flush=True)
    runner.train()
    print(f"rank {runner.rank} of {runner.world_size} ends at {runner.state.train.global_step}", flush=True)
"""
# Without it, restarts with the c10d rendezvous can fail or hang (pytorch#135712).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FLAGS = ("--max-restarts", "3", "--monitor-interval", "0.1")


def weights(root: Path) -> torch.Tensor:
    (latest,) = root.rglob("latest.pth")
    model = torch.load(latest, weights_only=True)["model"]
    return torch.cat([value.flatten() for value in model.values()])


def test_a_killed_rank_restarts_the_group_from_its_last_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    exit_code, output = run_program(script, str(tmp_path / "whole"), nproc_per_node=2)
    assert exit_code == 0, output
    environment = {**ENVIRONMENT, "KILL_AT": "7"}
    exit_code, output = run_program(
        script, str(tmp_path / "parts"), flags=FLAGS, environment=environment, nproc_per_node=2
    )
    assert exit_code == 0, output
    assert "rank 0 of 2 begins at 7" in output and all(
        f"rank {rank} of 2 ends at 16" in output for rank in range(2)
    )
    (latest,) = (tmp_path / "parts").rglob("latest.pth")
    elastic = torch.load(latest, weights_only=True)["state"]["elastic"]
    assert (elastic["restart_count"], elastic["attempts"]) == (1, 2)
    assert torch.equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


class Gate:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.open_to(0)

    def open_to(self, updates: int) -> None:
        self.updates = updates
        written = self.path.with_suffix(".new")
        written.write_text(str(updates))
        os.replace(written, self.path)

    def open_until(self, job: Job, text: str, *, timeout: float) -> None:

        def seen() -> bool:
            nonlocal opened
            if time.monotonic() - opened > 0.25 and f"after {self.updates} updates" in job.output:
                self.open_to(self.updates + 1)
                opened = time.monotonic()
            return text in job.output

        opened = time.monotonic()

        job.wait_until(seen, timeout)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def agent(script: Path, root: str, port: int, gate: Gate, steps: int) -> Iterator[Job]:
    """Start the agent of a node of one worker, of a job of one to four nodes that meet on a port."""
    meeting = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"
    flags = [
        "--nnodes",
        "1:4",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "elastic",
    ]
    flags += [
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--local-addr",
        "127.0.0.1",
        "--rdzv-conf",
        meeting,
        *FLAGS,
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(script), root]
    environment = {**LOOPBACK, **ENVIRONMENT, "GATE": str(gate.path), "STEPS": str(steps)}
    with Job(command, environment=environment) as job:
        yield job


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_leave_and_join_one_job(tmp_path: Path) -> None:
    """Two agents; one is killed together with its worker, the other goes on alone; a third one joins, and both end the run."""
    script, steps = tmp_path / "train.py", 200
    script.write_text(SCRIPT)
    exit_code, output = run_python(
        script, str(tmp_path / "whole"), timeout=240, environment={"STEPS": str(steps)}
    )
    assert exit_code == 0, output
    gate, root, port = Gate(tmp_path / "gate"), str(tmp_path / "parts"), free_port()
    with agent(script, root, port, gate, steps) as first:
        # Whichever agent binds the port first keeps the store of the job, and must not be the one that is killed.
        first.wait_until(lambda: listens(port), 240)
        with agent(script, root, port, gate, steps) as second:
            first.wait_for_output("rank 0 of 2 begins at 0", timeout=240)
            gate.open_to(4)
            first.wait_for_output("after 4 updates", timeout=240)
            second.kill()
        gate.open_to(8)
        first.wait_for_output("rank 0 of 1 begins at 4", timeout=240)
        first.wait_for_output("after 8 updates", timeout=240)
        with agent(script, root, port, gate, steps) as third:
            gate.open_until(first, "of 2 begins at", timeout=240)
            gate.open_to(steps)
            exit_code, output = third.wait(240)
            assert exit_code == 0 and f"of 2 ends at {steps}" in output, output
            exit_code, output = first.wait(240)
    assert exit_code == 0, output
    assert f"of 2 ends at {steps}" in output
    assert len(list((tmp_path / "parts").rglob("latest.pth"))) == 1
    assert (weights(tmp_path / "parts") - weights(tmp_path / "whole")).abs().max().item() < 1e-12
