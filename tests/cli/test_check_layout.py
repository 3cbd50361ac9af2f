"""`danling check-layout` and `runner.check_layout` on a user's own program: right, wrong, and what cannot be checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.recorded import danling

from danling.cli.main import main

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl

class Program(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        points = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
        self.datasets = {"train": TensorDataset(points, points[:, :3].argmax(1)), "val": TensorDataset(points, points[:, 0].long())}
        if "fails" in sys.argv:
            raise RuntimeError("out of luck")

    def complete_gradients(self):
        if "twice" in sys.argv and self.distributed:
            for parameter in self.parameters:
                parameter.grad.mul_(0.5)
        super().complete_gradients()

if __name__ == "__main__":
    settings = {"epochs": 1, "dir": sys.argv[1], "dataloader": {"batch_size": 8}, "optim": {"type": "adamw", "lr": 0.01}}
    with Program(settings) as runner:
        if "method" in sys.argv:
            report = runner.check_layout("shard=2", timeout=90)
            print(report.is_same, report.samples)
        else:
            print(runner.train()[1]["val"])
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "train.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "elsewhere")]


@pytest.mark.timeout(400)
def test_a_program_that_is_right_and_one_that_divides_twice(program: list[str], tmp_path: Path) -> None:
    done = danling("check-layout", "shard=2", "--timeout", "120", "--json", "--", *program, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["same"] and facts["samples"] == 7 and facts["parameters"] == 4 and facts["step"] is None
    assert not (tmp_path / "elsewhere").exists()
    done = danling("check-layout", "ddp=2", "--timeout", "120", "--", *program, "twice", timeout=380)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ddp=2: update 1 is not that of one process" in done.stdout and "4 of 4 gradients differ" in done.stdout
    assert "every gradient is 0.5 times that of one process, and the loss is the same" in done.stdout


@pytest.mark.timeout(400)
def test_a_script_that_asks_by_itself(program: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*program, "method"], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["True", "7"]


def test_a_program_that_fails_is_not_checked(program: list[str]) -> None:
    done = danling("check-layout", "shard=2", "--", *program, "fails", timeout=120)
    assert done.returncode == 2
    assert "makes 2 updates of a runner in one process. Received: exit code 1 of rank 0 after 0 updates" in done.stderr
    assert "out of luck" in done.stderr and "It has to train in one process" in done.stderr


@pytest.mark.parametrize(
    ("words", "received"),
    [
        (["tensor=x", "--", "python"], "such as shard=2,tensor=2"),
        (["shard=2"], "Expected a program behind `--`"),
        (["shard=2", "--", "torchrun", "--nproc-per-node", "2", "train.py"], "as it is started for one process"),
        (["shard=2", "--updates", "0", "--", "python"], "--updates to be at least 1"),
    ],
)
def test_command_lines_that_cannot_be(words: list[str], received: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-layout", *words]) == 2
    assert received in capsys.readouterr().err
