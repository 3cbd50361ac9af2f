"""G6: torchrun restarts a job that lost a process by SIGKILL, with another number of processes each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.kill import run_python
from support.torchrun import run_torchrun, torchrun

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
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if str(self.state.train.global_step) == os.environ.get("KILL_AT") and self.rank == self.world_size - 1:
            if self.elastic_state.restart_count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


config = dl.RunnerConfig(seed=1, steps=16, auto_resume=True, workspace_root=sys.argv[1])
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_restarts_of_torchrun_at_another_number_of_processes(tmp_path: Path) -> None:
    """Each job loses a rank by SIGKILL, is restarted by torchrun, and is then preempted: the next one has another size."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    exit_code, output = run_python(script, str(tmp_path / "whole"), timeout=240)
    assert exit_code == 0, output
    root = str(tmp_path / "parts")
    for world_size, kill_at, preempted_at in ((2, 2, 4), (1, 6, 8), (3, 10, 12)):
        environment = {**ENVIRONMENT, "KILL_AT": str(kill_at), "PAUSE": "0.3"}
        with torchrun(script, root, nproc_per_node=world_size, flags=FLAGS, environment=environment) as job:
            job.wait_for_output(f"rank 0 of {world_size} begins at {kill_at}", timeout=240)
            job.wait_for_output(f"after {preempted_at} updates", timeout=240)
            job.kill()
    exit_code, output = run_torchrun(script, root, nproc_per_node=4, flags=FLAGS, environment=ENVIRONMENT, timeout=240)
    assert exit_code == 0, output
    assert all(f"rank {rank} of 4 ends at 16" in output for rank in range(4))
    assert (weights(tmp_path / "parts") - weights(tmp_path / "whole")).abs().max().item() < 1e-12
