"""G10: a script without `if __name__ == "__main__"` runs once on each rank, whatever writes its checkpoints; the writer ends with it."""

from __future__ import annotations

import os
import runpy
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from support.patience import until
from support.processes import ProcessFailure, run_outcomes, run_processes
from support.saves import load, make_manager, save

from danling.checkpoints import CheckpointError, TorchDistributedCheckpointManager
from danling.checkpoints.writer_process import WriterProcess

SCRIPT = """
import os
import torch
from torch import nn
import danling as dl

with open("runs", "a") as file:
    file.write(f"{os.getpid()}\\n")

class Lines(dl.Runner):
    def __init__(self, config):
        super().__init__(config)
        data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
        self.datasets = {"train": data}
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()

MODE = os.environ["MODE"]
config = dl.RunnerConfig(seed=1, steps=4, dir="run", dataloader={"batch_size": 4}, optim={"type": "adamw", "lr": 0.1}, log=False)
config.checkpoint.backend, config.checkpoint.async_mode, config.checkpoint.interval = "dcp", MODE, 2
with Lines(config) as runner:
    runner.train()
"""


def run_script(mode: str) -> None:
    os.environ["MODE"] = mode
    # Under the name of a program: what is spawned while it runs finds its path in `__main__`.
    runpy.run_path(str(Path("train.py").absolute()), run_name="__main__")


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [pytest.param("async", 2, marks=pytest.mark.slow), ("async_with_pinned_mem", 2)],
)
def test_a_script_without_a_guard_runs_once_on_each_rank(
    tmp_path: Path, mode: str, world_size: int
) -> None:
    Path("train.py").write_text(SCRIPT)
    run_processes(run_script, mode, world_size=world_size, timeout=100)
    assert (
        len(set(Path("runs").read_text().split()))
        == len(Path("runs").read_text().split())
        == world_size
    )
    manager = make_manager("dcp", Path("elsewhere"))
    assert manager.load_checkpoint("run/checkpoints/latest")["state"]["train"]["global_step"] == 4


def writer_of(manager: Any) -> int:
    assert isinstance(manager, TorchDistributedCheckpointManager) and manager._process is not None
    return manager._process.pid


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def save_and_die() -> None:
    manager = make_manager("dcp", Path("checkpoints"), mode="async_with_pinned_mem")
    save(manager, 1)
    Path("writer").write_text(str(writer_of(manager)))
    manager.save_checkpoint({"format_version": 1, "state": {"step": 2}}, epoch=0, global_step=2)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_writer_ends_with_its_killed_rank(tmp_path: Path) -> None:
    (outcome,) = run_outcomes(save_and_die, world_size=1)
    assert isinstance(outcome.error, ProcessFailure)
    until(lambda: gone(int(Path("writer").read_text())))
    manager = make_manager("dcp", Path("checkpoints"))
    assert manager.load_checkpoint("latest")["state"]["step"] in (1, 2)


def when_asked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set when the process is asked to write: one that ended before is replaced, and nobody hears of it."""
    asked, ask = threading.Event(), WriterProcess.write

    def write(self: WriterProcess, *arguments: Any) -> None:
        asked.set()
        ask(self, *arguments)

    monkeypatch.setattr(WriterProcess, "write", write)
    return asked


def test_a_writer_heeds_no_signals_is_replaced_when_it_dies_and_ends_with_its_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one test: a process that writes takes seconds to start."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    manager = make_manager("dcp", tmp_path / "checkpoints", mode="async_with_pinned_mem")
    first = writer_of(manager)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(first, number)  # it has only just been started
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
    save(manager, 1)
    assert writer_of(manager) == first
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(first, number)
    save(manager, 2)
    assert load(manager, "latest") == 2 and writer_of(manager) == first
    os.kill(first, signal.SIGSTOP)
    asked = when_asked(monkeypatch)
    manager.save_checkpoint({"format_version": 1, "state": {"step": 3}}, epoch=0, global_step=3)
    assert asked.wait(60)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(
        CheckpointError, match="process that writes checkpoints .* ended by SIGKILL"
    ):
        manager.wait()
    assert load(manager, "latest") == 2
    save(manager, 4)
    second = writer_of(manager)
    assert load(manager, "latest") == 4 and second != first
    # Two are kept, and nothing is left of the one that was not written.
    assert len(list((tmp_path / "checkpoints" / "targets").iterdir())) == 2
    manager.close()
    assert gone(second)


def test_broken_python_is_refused_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ValueError, match="Set checkpoint.async_mode='async'"):
        make_manager("dcp", tmp_path, mode="async_with_pinned_mem")
