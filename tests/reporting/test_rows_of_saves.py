"""Every row of `metrics.jsonl` belongs to a save: after a kill and a resume each one is there once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.saves import rows
from support.toys import Line, Small, settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from danling.reporting import JsonlTracker, read_jsonl
from danling.reporting.jsonl import FileMark
from danling.utils.observers import Observer


class KilledBeforeItSaves(Line):
    """Is killed after the row of an evaluation and before the save that follows."""

    not_saved = ("killed",)
    killed = False

    def save_checkpoint(self, **options: Any) -> None:
        if self.killed and self.train_state.global_step == 4:
            self.checkpoint_manager.wait()  # the save before the evaluation is on the disk
            os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(**options)


def sharded(root: Path, stack: str) -> dict[str, Any]:
    layout = (
        {"stack": "parallel", "parallel": {"axes": {"shard": 2}}} if stack == "parallel" else {}
    )
    return settings(
        root,
        steps=8,
        log_interval=1,
        evaluate_interval=4,
        auto_resume=True,
        checkpoint={"interval": 2, "backend": "dcp"},
        **layout,
    )


def train(config: Mapping[str, Any], killed: bool = False) -> None:
    with KilledBeforeItSaves(config) as runner:
        runner.killed = killed
        runner.train()


@pytest.mark.parametrize("stack", ["ddp", "parallel"])
def test_kill_between_row_and_save_leaves_every_row_once_on_two_ranks(
    stack: str, tmp_path: Path
) -> None:
    killed = run_outcomes(train, sharded(tmp_path / "killed", stack), True)
    assert all(outcome.error is not None for outcome in killed)
    assert [row for row in rows(tmp_path / "killed") if "val/loss" in row[1]] == [
        (4, ("train_mean/loss", "val/loss", "val/samples"))
    ], "the row is written before the kill"
    run_processes(train, sharded(tmp_path / "killed", stack))
    run_processes(train, sharded(tmp_path / "alone", stack))
    assert rows(tmp_path / "killed") == rows(tmp_path / "alone")


class Counting(Observer):
    def __init__(self, runner: Any) -> None:
        self.runner, self.events = runner, list[tuple[str, int]]()

    def update_ended(self, outcome: Any) -> None:
        self.events.append(("update", self.runner.train_state.global_step))

    def save_started(self) -> None:
        self.events.append(("save", self.runner.train_state.global_step))


class SavesInStep(Small):
    """Saves within `step`, where the update is made, and is killed there."""

    not_saved = ("ends",)
    ends = False

    def step(self) -> Any:
        outcome = super().step()
        if self.train_state.global_step == 3:
            self.save_checkpoint()
            self.checkpoint_manager.wait()
            if self.ends:
                os._exit(3)
        return outcome


def save_in_step(config: Mapping[str, Any], ends: bool = False) -> list[tuple[str, int]]:
    with SavesInStep(config) as runner:
        runner.ends = ends
        observer = Counting(runner)
        runner.observers.append(observer)
        runner.train()
        return observer.events


@pytest.mark.parametrize("world_size", [1, 2])
def test_kill_behind_a_save_in_step_leaves_every_row_once(world_size: int, tmp_path: Path) -> None:
    more = {"steps": 6, "log_interval": 1, "auto_resume": True, "checkpoint": {"interval": 6}}
    config = settings(tmp_path / "killed", **more)
    killed = run_outcomes(save_in_step, config, True, world_size=world_size)
    assert {outcome.exit_code for outcome in killed} == {3}
    for of_rank in run_processes(save_in_step, config, world_size=world_size):
        assert of_rank == [("update", 4), ("update", 5), ("update", 6), ("save", 6)]
    for of_rank in run_processes(
        save_in_step, settings(tmp_path / "alone", **more), world_size=world_size
    ):
        # An update is told of once, before the save that has it.
        assert of_rank == [*(("update", step) for step in (1, 2, 3)), ("save", 3), *of_rank[4:]]
        assert of_rank[4:] == [("update", 4), ("update", 5), ("update", 6), ("save", 6)]
    assert rows(tmp_path / "killed") == rows(tmp_path / "alone")


class LogsItself(Small):
    """Logs rows of its own: within an evaluation, which fails or is stopped once, and with numbers of its own after a save."""

    not_saved = ("disturbed",)
    disturbed = ""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.datasets["val"] = self.datasets["train"]

    def evaluate_steps(self, split: str) -> Any:
        self.log_figures({"own/begun": 1.0})
        is_first = self.train_state.global_step == 4
        if is_first and self.disturbed == "fails":
            raise RuntimeError("the evaluation fails")
        if is_first and self.disturbed == "stops":
            os.kill(os.getpid(), signal.SIGTERM)
        return super().evaluate_steps(split)

    def step(self) -> Any:
        outcome = super().step()
        if self.train_state.global_step == 6:
            # Between two saves: a resumed run makes this update again.
            self.log_figures({"own/phase": 1.0}, step=1)
            if self.disturbed == "ends":
                raise RuntimeError("the update fails")
        return outcome


@pytest.mark.parametrize("disturbed", ["fails", "stops", "ends"])
def test_own_rows_are_there_once_after_a_failure(disturbed: str, tmp_path: Path) -> None:
    def config(name: str) -> dict[str, Any]:
        policy = {"interval": 4, "async_mode": "disabled"}
        return settings(
            tmp_path / name,
            steps=8,
            log_interval=1,
            evaluate_interval=4,
            auto_resume=True,
            checkpoint=policy,
        )

    with pytest.raises((RuntimeError, SystemExit)), LogsItself(config("killed")) as runner:
        runner.disturbed = disturbed
        runner.train()
    for name in ("killed", "alone"):
        with LogsItself(config(name)) as runner:
            runner.train()
    assert rows(tmp_path / "killed") == rows(tmp_path / "alone")


def test_resume_from_an_older_save_cuts_by_its_own_mark(tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run",
        steps=8,
        log_interval=1,
        checkpoint={"interval": 4, "async_mode": "disabled"},
    )
    with Small(config) as runner:
        runner.log_figures(
            {"own/before": 1.0}, step=1_000_000
        )  # a number of its own, such as of samples
        runner.train()
    before = rows(tmp_path / "run")
    with Small({**config, "resume": "ckpt-s000000000004", "auto_resume": False}) as runner:
        runner.train()
    assert rows(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        (FileMark(3, 2), [1, 2, 2]),
        (FileMark(0, 0), []),
        # The file is another one, or was edited: the step decides.
        (FileMark(3, 1), [1, 2, 2, 2]),
        (FileMark(9, 2), [1, 2, 2, 2]),
        (None, [1, 2, 2, 2]),
    ],
)
def test_file_is_cut_at_its_mark(
    mark: FileMark | None, expected: list[int], tmp_path: Path
) -> None:
    file = tmp_path / "metrics.jsonl"
    steps = [1, 2, 2, 2, 3]
    file.write_text(
        "".join(json.dumps({"step": step, "loss": 0.0}) + "\n" for step in steps)
        + '{"step": 3, "lo'
    )
    tracker = JsonlTracker(file, resume_step=2, resume_mark=mark)
    tracker.log({"loss": 1.0}, 5)
    tracker.close()
    assert [record["step"] for record in read_jsonl(file)] == [*expected, 5]
    assert tracker.mark == FileMark(len(expected) + 1, 5)


def test_checkpoint_without_a_mark_resumes_by_its_step(tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run", steps=4, log_interval=1, checkpoint={"async_mode": "disabled"}
    )
    with Small(config) as runner:
        runner.train()
    payload = torch.load(tmp_path / "run" / "checkpoints" / "latest.pth", weights_only=True)
    assert payload["state"].pop("metrics_mark") == [8, 4]
    with Small({**config, "steps": 6, "dir": str(tmp_path / "other")}) as runner:
        runner.load_checkpoint(payload)
        assert runner.state_dict()["state"]["metrics_mark"] is None
        runner.train()
    assert [step for step, _ in rows(tmp_path / "other")] == [5, 5, 6, 6]


@pytest.mark.parametrize(
    ("lost", "named", "backend"),
    [
        ("file", "0 of the 6", "dcp"),
        ("end", "4 of the 6", "file"),
        ("torn", "5 of the 6", "file"),
        ("nothing", "", "file"),
    ],
)
def test_lost_rows_are_named(
    lost: str, named: str, backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path / "run", steps=3, log_interval=1, checkpoint={"backend": backend})
    with Small(config) as runner:
        runner.train()
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    if lost == "file":
        file.unlink()
    else:
        file.write_text(
            "".join({"end": lines[:4], "torn": [*lines[:5], lines[5][:9]], "nothing": lines}[lost])
        )
    with Small({**config, "steps": 4, "auto_resume": True}) as runner:
        runner.train()
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "lines that were written" in record.getMessage()
    ]
    assert [named in warning for warning in warnings] == ([True] if named else [])
    # In another directory, the file begins with the run.
    caplog.clear()
    with Small.from_checkpoint(
        tmp_path / "run" / "checkpoints", {"steps": 5, "dir": str(tmp_path / "other")}
    ) as runner:
        runner.train()
    assert (
        "lines that were written" not in caplog.text
        and (tmp_path / "other" / "metrics.jsonl").is_file()
    )


@pytest.mark.parametrize("way", ["same process", "save before an update"])
def test_rows_of_another_run_are_not_missed(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path / "run", steps=4, log_interval=1)
    with Small(config) as runner:
        runner.train()
    other = {**config, "dir": str(tmp_path / "other"), "steps": 6}
    latest = tmp_path / "run" / "checkpoints" / "latest.pth"
    if way == "same process":
        with Small({**other, "steps": 1}) as runner:
            runner.train()
            runner.load_checkpoint(latest)
            runner.config.steps = 6
            runner.train()
    else:
        with Small(other) as runner:
            runner.load_checkpoint(latest)
            runner.save_checkpoint()
        with Small({**other, "auto_resume": True}) as runner:
            runner.train()
    assert "lines that were written" not in caplog.text
    assert [step for step, _ in rows(tmp_path / "other")][-4:] == [5, 5, 6, 6]


def losses(run: Path) -> list[int]:
    """Return the steps of which TensorBoard shows a loss, in all attempts."""
    steps = []
    for directory in sorted((run / "tensorboard").iterdir()):
        reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
        reader.Reload()
        steps += [point.step for point in reader.Scalars("train/loss")]
    return steps


@pytest.mark.parametrize("way", ["again", "load_only", "same process"])
def test_figures_of_an_older_save_remove_no_rows(way: str, tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run", steps=4, log_interval=1, tensorboard=True, checkpoint={"interval": 1}
    )
    with Small(config) as runner:
        runner.train()
        before = rows(tmp_path / "run")
        if way == "same process":
            runner.load_checkpoint("ckpt-s000000000002")
            runner.log_figures({"test/acc": 0.5})
    if way != "same process":
        policy = {"interval": 1, "load_only": way == "load_only"}
        with Small({**config, "resume": "ckpt-s000000000002", "checkpoint": policy}) as runner:
            runner.log_figures({"test/acc": 0.5})
    assert rows(tmp_path / "run") == [*before, (2, ("test/acc",))]
    assert losses(tmp_path / "run") == [1, 2, 3, 4]


@pytest.mark.parametrize("way", ["train", "session", "same process"])
def test_training_behind_an_older_save_replaces_the_rows_after_it(way: str, tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run", steps=4, log_interval=1, tensorboard=True, checkpoint={"interval": 1}
    )

    def go_on(runner: Small) -> None:
        runner.log_figures({"test/acc": 0.5})
        if way == "session":
            with runner.session():
                pass
        else:
            runner.train()

    with Small(config) as runner:
        runner.train()
        before = rows(tmp_path / "run")
        if way == "same process":
            runner.load_checkpoint("ckpt-s000000000002")
            go_on(runner)
    if way != "same process":
        with Small({**config, "resume": "ckpt-s000000000002"}) as runner:
            go_on(runner)
    kept, added = [row for row in before if row[0] <= 2], (2, ("test/acc",))
    made_again = [] if way == "session" else [row for row in before if row[0] > 2]
    assert rows(tmp_path / "run") == [*kept, added, *made_again]
    if way != "session":
        assert losses(tmp_path / "run") == [1, 2, 3, 4]


class GoesBack(Small):
    """Loads an earlier save where its third pass begins."""

    has_gone_back = False

    def on_pass_start(self, split: str) -> None:
        super().on_pass_start(split)
        if self.state.train.global_step == 4 and not self.has_gone_back:
            self.has_gone_back = True
            self.load_checkpoint("ckpt-s000000000002")


def test_training_that_goes_back_has_its_rows_once(tmp_path: Path) -> None:
    config = settings(
        tmp_path / "run", steps=6, log_interval=1, tensorboard=True, checkpoint={"interval": 1}
    )
    with Small({**config, "dir": str(tmp_path / "whole")}) as runner:
        runner.train()
    with GoesBack(config) as runner:
        runner.train()
    assert rows(tmp_path / "run") == (expected := rows(tmp_path / "whole"))
    assert losses(tmp_path / "run") == [*range(1, 7)]
    # The saves after it have all of them.
    with Small({**config, "steps": 8, "auto_resume": True}) as runner:
        runner.train()
    assert rows(tmp_path / "run")[: len(expected)] == expected


def test_figures_before_a_save_are_of_that_save(tmp_path: Path) -> None:
    config = settings(tmp_path / "run", steps=2, log_interval=1)
    with Small(config) as runner:
        runner.train()
    added = [*rows(tmp_path / "run"), (2, ("test/acc",))]
    with Small({**config, "auto_resume": True}) as runner:
        runner.log_figures({"test/acc": 0.5})
        runner.save_checkpoint()
    with Small({**config, "steps": 4, "auto_resume": True}) as runner:
        runner.train()
    assert rows(tmp_path / "run")[: len(added)] == added


def test_line_behind_a_torn_one_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 0.0}\n{"step": 2, "lo')
    tracker = JsonlTracker(file, resume_step=1, resume_mark=FileMark(1, 1), has_begun=False)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert [record["loss"] for record in read_jsonl(file)] == [0.0, 1.0] and len(
        file.read_text().splitlines()
    ) == 3
