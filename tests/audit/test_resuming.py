"""A program of a user's is stopped, killed and resumed by the doctor, and what does not come back is named."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from support.recorded import danling
from support.warm import interpreter

from danling.audit.resuming import ResumeCheck, ScriptFailed
from danling.prove.program import kill_program, start_program

PROGRAM = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import danling as dl

CALLS = []

class Toy(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        points = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        self.datasets = {"train": TensorDataset(points, (points.sum(1) > 0).long())}
        self.model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        self.criterion = nn.CrossEntropyLoss()

    def compute_loss(self, pred, target):
        CALLS.append(1)  # of no checkpoint
        loss = super().compute_loss(pred, target)
        return loss * (1 + 0.01 * len(CALLS)) if "counter" in sys.argv else loss

    def save_checkpoint(self, **settings):
        if "unsaved" not in sys.argv:
            super().save_checkpoint(**settings)

settings = {"steps": 5 if "short" in sys.argv else 2000, "seed": None if "unseeded" in sys.argv else 1,
            "dataloader": {"batch_size": 8}, "optim": {"type": "adamw", "lr": 1e-2}, "checkpoint_dir": sys.argv[1]}
with Toy(settings) as runner:
    runner.train()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The program, which would write its checkpoints somewhere else."""
    (tmp_path / "train.py").write_text(PROGRAM)
    return [interpreter(), str(tmp_path / "train.py"), str(tmp_path / "elsewhere")]


@pytest.mark.timeout(400)
def test_program_resumes_after_every_signal(command: list[str], tmp_path: Path) -> None:
    done = danling(
        "doctor",
        "--script",
        "--timeout",
        "90",
        "--updates",
        "4",
        "--",
        *command,
        timeout=380,
        warm=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = ["begins alike", "resumes after SIGTERM", "resumes after SIGKILL"]
    assert [line[:8].strip() for line in lines] == ["ok"] * 3
    assert [line[8:].split("  ")[0].strip() for line in lines] == names
    assert all("bitwise the same" in line for line in lines)
    phases = [line for line in done.stderr.splitlines() if line.startswith("danling: ")]
    assert [line.split(":")[1].strip() for line in phases] == [
        f"{phase} of 4" for phase in range(1, 5)
    ]
    assert all(re.search(r"about \d+ s are left at most$", line) for line in phases[1:])
    assert not (tmp_path / "elsewhere").exists()  # nothing is written but in the scratch directory


def _examined(command: list[str], place: Path, **settings: float) -> list[tuple[str, str, str]]:
    place.mkdir()
    return list(
        ResumeCheck(command, place, updates=4, timeout=settings.get("timeout", 90)).examine()
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_of_torchrun(command: list[str], tmp_path: Path) -> None:
    launch = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    found = _examined([interpreter(), *launch.split(), *command[1:]], tmp_path / "scratch")
    assert [state for _, state, _ in found] == ["ok"] * 3, found


@pytest.mark.timeout(400)
def test_unsaved_counter_is_found(command: list[str], tmp_path: Path) -> None:
    (begins, *_), (resumes, state, detail) = _examined([*command, "counter"], tmp_path / "scratch")
    assert (begins, resumes, state) == ("begins alike", "resumes after SIGTERM", "failed")
    assert detail.startswith("loss diverged first, at update ")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_without_a_seed_two_starts_differ(command: list[str], tmp_path: Path) -> None:
    ((begins, state, detail),) = _examined([*command, "unseeded"], tmp_path / "scratch")
    assert (begins, state) == ("begins alike", "failed") and "Set seed" in detail


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("flaw", "received"), [("unsaved", "it saved no checkpoint")])
def test_untriable_programs_are_refused(
    command: list[str], tmp_path: Path, flaw: str, received: str
) -> None:
    with pytest.raises(
        ScriptFailed, match=f"(?s)Expected a program that trains.*Received: .*{received}"
    ):
        _examined([*command, flaw], tmp_path / "scratch")


def test_too_short_program_is_named_after_its_first_start(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ScriptFailed, match=r"(?s)Received: 5 updates until its end.*Give it more to do"
    ):
        _examined([*command, "short"], tmp_path / "scratch")
    assert [line[:17] for line in capsys.readouterr().err.splitlines()] == ["danling: 1 of 4: "]


def test_program_without_a_second_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ScriptFailed,
        match=r"(?s)exit code 1 after 0 updates.*Fix that first. The program must run again",
    ):
        _examined([sys.executable, "-S", "-c", "open('/no/such/place')"], tmp_path / "scratch")


def test_program_without_a_runner_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ScriptFailed, match=r"(?s)exit code 0 after 0 updates of a runner.*printed:\nhello"
    ):
        _examined([sys.executable, "-S", "-c", "print('hello')"], tmp_path / "scratch")
    with pytest.raises(ValueError, match="Expected a program behind `--`"):
        _examined([], tmp_path / "none")


def test_a_kill_reaches_processes_in_sessions_of_their_own(tmp_path: Path) -> None:
    beneath = (
        "import os, time; os.setsid(); open('pid', 'w').write(str(os.getpid())); time.sleep(60)"
    )
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {beneath!r}], cwd={str(tmp_path)!r})"
    process = start_program([sys.executable, "-S", "-c", program], {}, log=tmp_path / "log")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    kill_program(process)
    pid = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{pid}/stat")
    while (
        state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"
    ):  # until its new parent has seen it
        time.sleep(0.01)
    assert process.returncode == -9
