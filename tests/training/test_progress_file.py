"""`progress.json`: what it says while a run trains, how it says that the run has ended, and what happens where it cannot be written."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job
from support.patience import until
from support.processes import run_processes
from support.toys import Small, settings
from support.warm import interpreter
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.training import UpdateOutcome, progress_file
from danling.utils.observers import Observer

KEYS = {
    "format", "state", "reason", "time", "step", "steps", "epoch", "epochs", "seconds", "seconds_left", "last_checkpoint", "processes",
    "host", "pid",
}  # fmt: skip


def read(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "progress.json").read_text())
    assert found.keys() == KEYS
    return found


class Evaluated(Small):
    """Small, with a split to evaluate."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets["val"] = self.datasets["train"]


class Reading(Observer):
    """Keeps what the file says after each event."""

    critical = True

    def __init__(self, root: Path) -> None:
        self.root, self.seen = root, list[tuple[str, int]]()

    def note(self) -> None:
        found = read(self.root)
        if (entry := (found["state"], found["step"])) not in self.seen[-1:]:
            self.seen.append(entry)

    def training_started(self) -> None:
        self.note()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        self.note()

    def evaluation_batch_started(self, split: str, number: int) -> None:
        self.note()

    def save_started(self) -> None:
        self.note()


def watched(root: Path, **more: Any) -> list[tuple[str, int]]:
    with Evaluated(settings(root, **more)) as runner:
        reading = Reading(root)
        runner.observers.append(reading)
        runner.train()
    return reading.seen


def test_every_state_is_written_at_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_file, "SECONDS_BETWEEN_WRITES", 0.0)
    seen = watched(tmp_path, epochs=2)
    of_epoch = [("running", 1), ("running", 2), ("evaluating", 2), ("saving", 2)]
    tried = ("evaluating", 0)
    assert seen == [
        ("running", 0),
        tried,
        *of_epoch,
        *((state, step + 2) for state, step in of_epoch),
    ]
    found = read(tmp_path)
    assert (found["state"], found["step"], found["steps"], found["epoch"], found["epochs"]) == (
        "done",
        4,
        4,
        2,
        2,
    )
    assert found["last_checkpoint"] == {"step": 4, "epoch": 2} and found["seconds_left"] == 0
    assert (found["pid"], found["processes"]) == (os.getpid(), 1) and abs(
        found["time"] - time.time()
    ) < 60


def test_a_short_run_writes_twice(tmp_path: Path) -> None:
    assert watched(tmp_path, epochs=2) == [("running", 0)]
    assert read(tmp_path)["state"] == "done"


class Ending(Evaluated):
    """Ends in its third update, by what the test sets."""

    ending = ""

    def train_step(self, data: Any) -> Any:
        if self.state.train.global_step == 2:
            if self.ending == "error":
                raise ArithmeticError("secret: 42")
            if self.ending == "interrupt":
                raise KeyboardInterrupt
            if self.ending.startswith("exit"):
                sys.exit(int(self.ending.removeprefix("exit ")))
            for name in self.ending.split() if self.ending.startswith("SIG") else ():
                signal.raise_signal(signal.Signals[name])
        return super().train_step(data)


@pytest.mark.parametrize(
    ("ending", "more", "state", "reason", "step"),
    [
        ("error", {}, "failed", "ArithmeticError", 2),
        ("interrupt", {}, "stopped", "interrupt", 2),
        ("SIGINT SIGINT", {}, "stopped", "interrupt", 2),
        ("SIGTERM SIGINT SIGINT", {}, "stopped", "interrupt", 2),
        ("SIGINT", {}, "stopped", "interrupt", 3),
        ("SIGTERM", {}, "stopped", "terminate", 3),
        ("SIGTERM SIGINT", {}, "stopped", "terminate", 3),
        ("SIGUSR1", {}, "stopped", "user_signal", 3),
        ("exit 0", {}, "stopped", "exit", 2),
        ("exit 3", {}, "failed", "SystemExit", 2),
        ("", {"max_time": 1e-6}, "stopped", "stop", 0),
        ("", {"patience": 1, "optim": {"type": "sgd", "lr": 0.0}}, "done", "patience", 4),
        ("", {}, "done", None, 8),
    ],
)
def test_the_end_of_a_training_is_written(
    tmp_path: Path, ending: str, more: dict[str, Any], state: str, reason: str | None, step: int
) -> None:
    with Ending(settings(tmp_path, epochs=4, **more)) as runner:
        runner.ending = ending
        with contextlib.suppress(ArithmeticError, KeyboardInterrupt, SystemExit):
            runner.train()
    found = read(tmp_path)
    assert (found["state"], found["reason"], found["step"]) == (state, reason, step)
    if state == "done":
        assert found["seconds_left"] == 0
    latest = torch.load(tmp_path / "checkpoints" / "latest.pth", weights_only=True)
    assert found["last_checkpoint"]["step"] == latest["state"]["train"]["global_step"]


class Unfinished(Evaluated):
    def init_checkpoint_manager(self) -> None:
        raise ArithmeticError


@pytest.mark.parametrize(
    ("error", "trains", "by_hand", "end"),
    [
        (ArithmeticError(), False, False, ("failed", "ArithmeticError")),
        (KeyboardInterrupt(), False, False, ("stopped", "interrupt")),
        (ArithmeticError(), True, False, ("failed", "ArithmeticError")),
        (SystemExit(143), True, False, ("stopped", "terminate")),
        (SystemExit("no disk"), True, False, ("failed", "SystemExit")),
        (SystemExit(0), True, False, ("done", None)),
        (ArithmeticError(), False, True, ("failed", "ArithmeticError")),
        (KeyboardInterrupt(), False, True, ("stopped", "interrupt")),
        # A generator of the program, which it leaves: as `break` ends a loop.
        (GeneratorExit(), True, False, ("done", None)),
        (GeneratorExit(), False, True, ("stopped", None)),
    ],
)
def test_an_exception_outside_of_train_is_written(
    tmp_path: Path, error: BaseException, trains: bool, by_hand: bool, end: tuple[str, str | None]
) -> None:
    with contextlib.suppress(type(error)), Evaluated(settings(tmp_path, epochs=1)) as runner:
        if trains:
            runner.train()
        if by_hand:
            runner.train_step(next(iter(runner.dataloaders["train"])))
        raise error
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == end


def test_a_failing_construction_is_written(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        Unfinished(settings(tmp_path, epochs=1))
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == ("failed", "ArithmeticError")


class FailingEvaluation(Evaluated):
    fails = True

    def evaluate_epoch(self, split: str = "val") -> dict[str, float]:
        if self.fails:
            raise ArithmeticError
        return super().evaluate_epoch(split)


def test_a_training_after_a_failed_one_has_its_own_end(tmp_path: Path) -> None:
    with FailingEvaluation(settings(tmp_path, epochs=2)) as runner:
        with contextlib.suppress(ArithmeticError):
            runner.train()
        assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == ("failed", "ArithmeticError")
        runner.fails = False
        runner.train()
    assert (read(tmp_path)["state"], read(tmp_path)["reason"]) == ("done", None)


def test_a_resumed_run_replaces_the_end_of_the_last_attempt(tmp_path: Path) -> None:
    with Evaluated(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    with Evaluated(settings(tmp_path, epochs=2, auto_resume=True)):
        assert read(tmp_path)["state"] == "starting"
    assert read(tmp_path)["state"] == "stopped"
    assert watched(tmp_path, epochs=2, auto_resume=True) == [("running", 2)]
    with Evaluated(settings(tmp_path, epochs=2, auto_resume=True)) as runner:
        runner.evaluate("val")
    assert (read(tmp_path)["state"], read(tmp_path)["step"]) == ("done", 4)


def test_a_loop_by_hand_writes_it_too(tmp_path: Path) -> None:
    with Evaluated(settings(tmp_path)) as runner:
        with runner.session():
            assert read(tmp_path)["state"] == "running"
            for batch in runner.dataloaders["train"]:
                runner.train_step(batch)
                runner.step()
                runner.boundary()
        assert read(tmp_path)["state"] == "done" and read(tmp_path)["steps"] is None
        runner.evaluate("val")
        assert read(tmp_path)["state"] == "done"


class Blocked(Evaluated):
    def on_pass_start(self, split: str) -> None:
        file = self.workspace.dir / "progress.json"
        if file.is_file():
            file.unlink()
            file.mkdir()


def test_unwritable_file_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_file, "SECONDS_BETWEEN_WRITES", 0.0)
    with Blocked(settings(tmp_path, epochs=2)) as runner:
        runner.train()
    assert runner.state.train.global_step == 4
    (said,) = [each for each in caplog.messages if "progress.json could not be written" in each]
    assert ".." not in said.replace(str(tmp_path), "")
    assert not list(tmp_path.glob(".progress.json*"))


class OnAnyStack(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets = {
            "train": TensorDataset(torch.arange(32.0).reshape(8, 4), torch.arange(8) % 2)
        }
        self.model, self.criterion = nn.Linear(4, 2), nn.CrossEntropyLoss()


def _train(root: str, stack: str) -> bool:
    axes = {"parallel": {"axes": {"shard": 2}}} if stack == "parallel" else {}
    with OnAnyStack(settings(root, epochs=2, stack=stack, **axes)) as runner:
        runner.train()
        return any(isinstance(each, progress_file.ProgressFile) for each in runner.observers)


@pytest.mark.parametrize("stack", ["ddp", "parallel"])
def test_the_main_process_alone_writes_it(tmp_path: Path, stack: str) -> None:
    assert run_processes(_train, str(tmp_path), stack, world_size=2) == [True, False]
    found = read(tmp_path)
    assert (found["state"], found["processes"], found["last_checkpoint"]) == (
        "done",
        2,
        {"step": 2, "epoch": 2},
    )


def test_looking_run_leaves_the_file_alone(tmp_path: Path) -> None:
    with Evaluated(settings(tmp_path, epochs=1)) as runner:
        runner.train()
    before = (tmp_path / "progress.json").read_bytes()
    with Evaluated(
        settings(tmp_path, epochs=2, auto_resume=True, checkpoint={"load_only": True})
    ) as runner:
        runner.train()
    assert (tmp_path / "progress.json").read_bytes() == before


def test_an_object_store_has_the_end_of_the_run(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", epochs=1)
    del config["dir"]
    config |= {
        "workspace_root": str(tmp_path / "runs"),
        "checkpoint": {"remote": {"url": f"file://{tmp_path}/store"}},
    }
    with Evaluated(config) as runner:
        runner.train()
    (copy,) = (tmp_path / "store").rglob("progress.json")
    assert json.loads(copy.read_text())["state"] == "done"
    # On another machine the run has its own file from the start.
    config |= {"workspace_root": str(tmp_path / "other"), "auto_resume": True}
    with Evaluated(config) as runner:
        assert runner.state.train.global_step == 2
        assert read(runner.workspace.dir)["state"] == "starting"


KILLED = """
import os
import sys
import time
import torch
from support.toys import Small, settings

class Slow(Small):
    def train_step(self, data):
        result = super().train_step(data)
        if self.state.train.global_step == 3:
            print("third", flush=True)
            if sys.argv[1:]:
                os._exit(3)
            time.sleep(600)
        return result

with Slow(settings("run", steps=8)) as runner:
    runner.train()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit"])
def test_a_killed_run_is_left_as_running(how: str) -> None:
    Path("killed.py").write_text(KILLED)
    support = str(Path(__file__).parents[1])
    path = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    words = ["killed.py"] if how == "SIGKILL" else ["killed.py", how]
    with Job([interpreter(), *words], environment={"PYTHONPATH": path}) as job:
        job.wait_for_output("third")
        if how == "SIGKILL":
            until(lambda: read(Path("run"))["state"] == "running")
            job.signal(signal.SIGKILL)
        job.wait()
    assert read(Path("run"))["state"] == "running"
