"""`danling check-layout` and `runner.check_layout` on a user's own program: right, wrong, and what cannot be checked."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from support.job import Job
from support.recorded import danling
from support.warm import interpreter

from danling.cli.main import main

PROGRAM = """
import os
import sys
import time
from collections import UserDict
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
import danling as dl

POINTS = torch.randn(48, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
LABELS = POINTS[:, :3].argmax(1)

class Points(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return POINTS[index] * torch.ones(6), LABELS[index]  # of the default dtype, and data in float32

def mapping(samples):  # as those of Hugging Face are
    points, labels = zip(*samples)
    return UserDict(input=torch.stack(points).float(), labels=torch.stack(labels))

class Endless(IterableDataset):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        yield from ((POINTS[index], LABELS[index]) for index in range(self.rank, 48, self.size))

class Mixed(nn.Module):  # what people write in a forward
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down, self.rates = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), torch.ones(3)

    def forward(self, x):
        hidden = F.dropout(self.norm(self.up(x)), 0.3, self.training)
        scale = torch.ones(len(x), 1)
        return (self.down(hidden * scale) @ torch.diag(self.rates)).float()

class Pair(nn.Module):  # an auxiliary loss besides the output
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        out = self.model(x)
        return out, out.float().square().mean()

class Program(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
        if "mixed" in sys.argv:
            self.model = Mixed()
        if "pair" in sys.argv:
            self.model = Pair(self.model)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))
        self.datasets = {"train": Points(), "val": Points()}
        if "iterable" in sys.argv:
            self.datasets["train"] = Endless(self.data_domain.rank, self.data_domain.size)
        self.weights = torch.tensor([1.0, 2.0, 0.5])
        if "fails" in sys.argv:
            raise RuntimeError("out of luck")

    def build_datasampler(self, split, dataset):
        size, rank = self.data_domain.size, self.data_domain.rank
        return DistributedSampler(dataset, size, rank) if "sampler" in sys.argv and split == "train" else None

    def compute_loss(self, pred, target):
        if "pair" in sys.argv:
            pred = pred[0]
        if "mixed" in sys.argv:
            return F.cross_entropy(pred, target, weight=self.weights.to(pred))
        noise = torch.rand(()) if "noise" in sys.argv else 0.0
        return super().compute_loss(pred, target) + noise * pred.square().mean()

    def batch_weight(self, data, target):
        return self.weights[target].sum() if "mixed" in sys.argv else super().batch_weight(data, target)

    def train_step(self, data):
        if self.rank == 1 and self.state.train.global_step == 1:
            if "leaves" in sys.argv:
                os._exit(0)
            if "stuck" in sys.argv:
                time.sleep(100)
        return super().train_step(data)

    def complete_gradients(self):
        if "twice" in sys.argv and self.distributed:
            for parameter in self.parameters:
                parameter.grad.mul_(0.5)
        if "dead" in sys.argv and self.distributed:
            self.parameters[1].grad.zero_()
        super().complete_gradients()

if __name__ == "__main__":
    settings = {"epochs": 1, "dir": sys.argv[1], "dataloader": {"batch_size": 8}, "optim": {"type": "adamw", "lr": 0.01}}
    if "bf16" in sys.argv:
        settings["precision"] = "bf16"
    if "mixed" in sys.argv:
        settings["dataloader"]["train"] = {"collate_fn": mapping}
    with Program(settings) as runner:
        if "method" in sys.argv:
            sys.executable = sys.argv[-1]  # by which it is started again
            report = runner.check_layout("shard=2", timeout=90)
            print(report.is_same, report.samples)
        else:
            if "mixed" in sys.argv:
                runner.evaluate("val")
            print(runner.train()[1]["val"])
"""


@pytest.fixture
def program(tmp_path: Path) -> list[str]:
    (tmp_path / "train.py").write_text(PROGRAM)
    return [interpreter(), str(tmp_path / "train.py"), str(tmp_path / "elsewhere")]


def checked(
    layout: str, *words: str | Path, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    return danling("check-layout", layout, *words, timeout=timeout, warm=True)


@pytest.mark.timeout(300)
def test_right_program_passes_and_one_with_two_divisions_fails(
    program: list[str], tmp_path: Path
) -> None:
    done = checked("shard=2", "--json", "--", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert [line[:17] for line in done.stderr.splitlines() if " of 2: " in line] == [
        f"danling: {n} of 2: " for n in (1, 2)
    ]
    assert (
        facts["same"]
        and facts["samples"] == 7
        and facts["parameters"] == 4
        and facts["step"] is None
    )
    assert not (tmp_path / "elsewhere").exists()
    done = checked("ddp=2", "--", *program, "twice")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "ddp=2: update 1 is not that of one process" in done.stdout
        and "4 of 4 gradients differ" in done.stdout
    )
    assert "0.5  replicate  0.5 times that of one process" in done.stdout


@pytest.mark.timeout(300)
def test_parameter_without_gradient_is_found_in_bf16(program: list[str]) -> None:
    """A share of the whole norm would cover it; and the scalar that the model returns is no output of a layer."""
    done = checked("ddp=2", "--dtype", "own", "--", *program, "bf16", "pair", "dead")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 of 4 gradients differ" in done.stdout and "0 times that of one process" in done.stdout
    assert "the first layer whose output differs" not in done.stdout
    assert "the backward pass is not; nearest to the loss is model.0.bias" in done.stdout


RIGHT = {
    # layout and options, words of the program: what is said of it
    "hsdp": (["replicate=2,shard=2"], [], "gradients of 4 parameters; 7 samples"),
    "accelerate": (["accelerate=2"], [], "gradients of 4 parameters; 7 samples"),
    "own dtype": (["shard=2", "--dtype", "own"], ["bf16"], "gradients of 4 parameters"),
    "a sampler": (["ddp=2"], ["sampler"], "8 samples each"),
    "an iterable": (["shard=2"], ["iterable"], "8 samples each"),
    "what people write": (["ddp=2"], ["mixed"], "7 samples each"),
}
SLOW = ("an iterable", "own dtype", "hsdp")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in RIGHT]
)
def test_programs_of_all_kinds_are_found_right(case: str, program: list[str]) -> None:
    """Stacks, and a float32 batch, float() and dropout as a call in a forward, batch normalization, an evaluation before."""
    layout, words, told = RIGHT[case]
    done = checked(*layout, "--", *program, *words)
    assert done.returncode == 0 and told in done.stdout, done.stdout + done.stderr
    if case == "what people write":
        assert "without dropout" in done.stdout and "up to 0.0003 count as rounding" in done.stdout


@pytest.mark.timeout(300)
def test_loss_changing_with_every_layout_gives_no_verdict(program: list[str]) -> None:
    done = checked("ddp=2", "--", *program, "noise")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "ddp=2: not checked, since the losses of update 1 cannot be the same" in done.stdout
    assert (
        "the forward pass draws random numbers" in done.stdout
        and "gradients differ" not in done.stdout
    )


@pytest.mark.timeout(300)
def test_script_asks_for_a_check_by_itself(program: list[str]) -> None:
    done = subprocess.run(
        [*program, "method", program[0]], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["True", "7"]


@pytest.mark.parametrize(
    ("word", "received", "hint"),
    [
        (
            "fails",
            "in one process. Received: exit code 1 of rank 0 after 0 updates",
            "It has to train in one process",
        ),
        (
            "leaves",
            "on the layout. Received: exit code 0 of rank 1 after 1 updates",
            "In one process it makes them",
        ),
        pytest.param(
            "stuck",
            "on the layout. Received: exit code 1 of rank",
            ")\nIn one process it makes them. Fix that",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_program_without_a_possible_check_is_named(
    word: str, received: str, hint: str, program: list[str]
) -> None:
    done = checked(
        "ddp=2", "--timeout", "30" if word == "stuck" else "90", "--", *program, word, timeout=120
    )
    assert done.returncode == 2
    assert f"makes 2 updates of a runner {received}" in done.stderr and hint in done.stderr, (
        done.stderr
    )
    assert ("out of luck" in done.stderr) == (word == "fails")
    # Where the ranks stood, of which one waits for the other.
    assert ("in train_step (time.sleep(100))" in done.stderr) == (word == "stuck"), done.stderr


def test_sigterm_ends_all_started_processes(program: list[str], tmp_path: Path) -> None:
    scratch = ["--scratch", str(tmp_path / "scratch")]
    command = [
        interpreter(),
        "-m",
        "danling",
        "check-layout",
        "ddp=2",
        *scratch,
        "--",
        *program,
        "stuck",
    ]
    with Job(command) as job:
        job.wait_until((tmp_path / "scratch" / "layout" / "rank-1.update-1.pt").exists)
        job.signal(signal.SIGTERM)
        assert job.wait().exit_code == 143
    table = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "train.py") not in table


@pytest.mark.parametrize(
    ("words", "received"),
    [
        (["tensor=x", "--", "python"], "such as shard=2,tensor=2"),
        (["shard=2"], "Expected a program behind `--`"),
        (
            ["shard=2", "--", "torchrun", "--nproc-per-node", "2", "train.py"],
            "as it is started for one process",
        ),
    ],
)
def test_impossible_command_lines_are_refused(
    words: list[str], received: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-layout", *words]) == 2
    assert received in capsys.readouterr().err
