"""Without TorchFT: torchrun restarts a group of which a rank was killed, and it goes on from its last checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from support.programs import run_program
from support.torchrun import run_torchrun

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl


class Runner(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.criterion = nn.CrossEntropyLoss()
        generator = torch.Generator().manual_seed(1)
        self.datasets = {"train": TensorDataset(torch.randn(40, 4, generator=generator), torch.arange(40) % 2)}

    def step(self):
        doomed = os.environ.get("KILL") and self.elastic_state.restart_count == 0 and self.rank == 1
        if doomed and self.state.train.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


config = dl.RunnerConfig(seed=1, steps=12, auto_resume=True, workspace_root=sys.argv[1])
config.optim = {"type": "adamw", "lr": 0.01}
config.dataloader.batch_size = 4
config.checkpoint = {"interval": 3, "async_enabled": False}
with Runner(config) as runner:
    runner.train()
    print(f"rank {runner.rank} ends at {runner.state.train.global_step} after {runner.elastic_state.restart_count} restarts")
"""
FLAGS = ("--max-restarts", "2", "--monitor-interval", "0.1")
# Without it, restarts with the c10d rendezvous can fail or hang (pytorch#135712).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def test_a_killed_rank_restarts_the_group_from_its_last_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    saved = []
    for kill in ("", "1"):
        root = tmp_path / f"runs{kill}"
        environment = {**ENVIRONMENT, "KILL": kill}
        if kill:
            exit_code, output = run_torchrun(script, str(root), flags=FLAGS, environment=environment)
        else:
            exit_code, output = run_program(script, str(root), nproc_per_node=2, environment=environment)
        assert exit_code == 0, output
        for rank in range(2):
            assert f"rank {rank} ends at 12 after {len(kill)} restarts" in output
        assert ("Resumed from latest at step 6" in output) == bool(kill)
        (latest,) = root.rglob("latest.pth")
        saved.append(torch.load(latest, weights_only=True))
    left_alone, restarted = saved
    assert restarted["state"]["elastic"]["restart_count"] == 1
    assert restarted["state"]["elastic"]["attempts"] == 2
    assert all(torch.equal(value, left_alone["model"][name]) for name, value in restarted["model"].items())
