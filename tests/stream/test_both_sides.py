"""One configuration for both sides of a stream, and `danling runs`, which shows them as one."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import run_processes
from support.streams import Draft, Points, Stopped, Target, assert_same

from danling.checkpoints import CheckpointMismatch
from danling.cli.main import main
from danling.stream import DirectoryStore, MemoryChannel, MemoryStore, SQLiteChannel, run_together
from danling.workspace.runs import find_runs

CONFIG: dict[str, Any] = {
    "seed": 1,
    "steps": 5,
    "accum_steps": 2,
    "auto_resume": True,
    "max_grad_norm": 1.0,
    "evaluate_interval": 2,
    "train_splits": ["train"],
    "score_split": "train",
    "optim": {"type": "sgd", "lr": 0.1},
    "scheduler": {"type": "cosine"},
    "ema": {"enabled": True},
    "dataloader": {"batch_size": 4},
    "checkpoint": {"interval": 2, "async_enabled": False},
}


class Frozen(Target):
    """A target of which nothing can be trained."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__(config, **options)
        self.model.requires_grad_(False)


def configuration(root: Path, **changes: Any) -> str:
    """Write a file for both sides, and return its path."""
    file = root / "both.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "workspace_root": str(root / "runs"), **changes}))
    return str(file)


def draft(config: Any, store: Any, channel: Any, **options: Any) -> Draft:

    class Configured(Draft):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.optimizer = None

    return Configured(config, store, channel, **options)


# One configuration


def test_one_file_serves_both_sides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "danling")
    config = configuration(tmp_path, score_split=None)
    store, channel = MemoryStore(), MemoryChannel()
    with (
        Frozen(config, indices=range(19), store=store, channel=channel) as target,
        draft(config, store, channel) as runner,
    ):
        assert (target.optimizer, target.scheduler, target.ema) == (None, None, None)
        assert runner.optimizer is not None and runner.ema is not None
        assert (target.config.steps, target.config.dataloader.batch_size) == (
            5,
            4,
        )  # a program may read them
        assert target.workspace.dir != runner.workspace.dir
        run_together(target, runner)
        end = runner.end()
    (said,) = [
        record.getMessage() for record in caplog.records if "trains nothing" in record.getMessage()
    ]
    left_out = (
        "optim, scheduler, ema, train_splits, evaluate_interval, steps, accum_steps, max_grad_norm"
    )
    assert said == f"A producer trains nothing: it leaves {left_out} out."
    assert not [record for record in caplog.records if "no effect" in record.getMessage()]

    store, channel = MemoryStore(), MemoryChannel()
    with Target(
        {"dir": str(tmp_path / "own"), "dataloader.batch_size": 4},
        indices=range(19),
        store=store,
        channel=channel,
    ) as target:
        target.produce()
    with draft(
        {**CONFIG, "score_split": None, "dir": str(tmp_path / "again")}, store, channel
    ) as runner:
        runner.train()
        assert_same(end, runner.end())


@pytest.mark.parametrize(
    "changes",
    [
        {"score_split": "val", "patience": 3},
        {"resume": "nowhere.pth"},
        {"epochs": 3, "steps": None, "evaluate_interval": None},
    ],
)
def test_parts_missing_from_a_producer_are_no_error(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = configuration(tmp_path, **changes)
    with Frozen(config, indices=range(5), store=MemoryStore(), channel=MemoryChannel()) as target:
        assert target.produce() == 5


@pytest.mark.parametrize(
    ("asked", "made", "is_said"),
    [
        (None, range(3), False),
        (["second"], range(3, 8), False),
        (["val", "second"], range(3, 8), False),
        (["val"], range(3), True),
    ],
)
def test_producer_goes_over_its_own_one_of_evaluate_splits(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    asked: list[str] | None,
    made: range,
    is_said: bool,
) -> None:
    class Several(Target):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            self.datasets = {"first": Points(range(3)), "second": Points(range(3, 8))}

    caplog.set_level(logging.INFO, "danling")
    channel = MemoryChannel()
    config = {"dir": str(tmp_path), **({} if asked is None else {"evaluate_splits": asked})}
    with Several(config, indices=(), store=MemoryStore(), channel=channel) as target:
        target.produce()
    assert [int(ref.id) for ref in channel.read(0, 99)] == list(made)
    assert ("it leaves evaluate_splits out" in caplog.text) == is_said


def test_the_directory_of_a_trainer_is_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "score_split": None, "dir": str(tmp_path / "run")}
    store, channel = MemoryStore(), MemoryChannel()
    with Target(
        {"dir": str(tmp_path / "own")}, indices=range(19), store=store, channel=channel
    ) as target:
        target.produce()
    with draft(config, store, channel) as runner:
        runner.train()
    with pytest.raises(
        CheckpointMismatch,
        match=r"(?s)Expected .*run/checkpoints to contain checkpoints of this run.*its own directory",
    ):
        Target(config, indices=range(19), store=MemoryStore(), channel=MemoryChannel())


# What is seen of both


def produce(root: Path, config: str, samples: int, ahead: int | None) -> int:
    """Produce in a process of its own; it waits for credit for a moment only."""
    store, channel = DirectoryStore(root / "store"), SQLiteChannel(root / "log.sqlite")
    options: dict[str, Any] = {"max_in_flight": ahead, "idle_timeout": 0.2}
    with Frozen(config, indices=range(samples), store=store, channel=channel, **options) as target:
        with suppress(TimeoutError):
            target.produce()
        return channel.published()


def train(root: Path, config: str, stop_at: int | None) -> None:
    """Train in a process of its own."""
    store, channel = DirectoryStore(root / "store"), SQLiteChannel(root / "log.sqlite")
    with suppress(Stopped), draft(config, store, channel, stop_at=stop_at) as runner:
        runner.train()


def shown(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[str]]:
    assert main(["runs", str(root / "runs"), "--json"]) == 0
    (stream,) = json.loads(capsys.readouterr().out)["streams"]
    assert main(["runs", str(root / "runs")]) == 0
    table = capsys.readouterr().out.partition("\nstreams\n")[2].splitlines()
    assert len(table) == 2
    return stream, table[1].split()


def test_both_sides_are_shown_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configuration(tmp_path, score_split=None, log_interval=1, log_seconds=0.0)
    assert run_processes(produce, tmp_path, config, 19, 16, world_size=1) == [16]
    names = {run.name for run in find_runs(tmp_path / "runs")}
    stream, row = shown(tmp_path, capsys)
    (producer,) = names
    assert stream["stream"] == str(tmp_path / "log.sqlite")
    assert (stream["published"], stream["trained"], stream["waiting"], stream["end"]) == (
        16,
        0,
        16,
        "failed",
    )
    assert stream["producers"][0]["waited_seconds"] >= 0.2

    run_processes(train, tmp_path, config, 3, world_size=1)
    (trainer,) = {run.name for run in find_runs(tmp_path / "runs")} - names
    stream, row = shown(tmp_path, capsys)
    assert [side["run"] for side in stream["producers"] + stream["trainers"]] == [producer, trainer]
    assert (stream["published"], stream["trained"], stream["waiting"]) == (16, 12, 4)
    assert row[:6] == [stream["stream"], "16", "12", "4", "failed", producer] and row[7] == trainer

    assert run_processes(produce, tmp_path, config, 19, None, world_size=1) == [19]
    run_processes(train, tmp_path, config, None, world_size=1)
    stream, row = shown(tmp_path, capsys)
    assert (stream["published"], stream["trained"], stream["waiting"], stream["end"]) == (
        19,
        19,
        0,
        "complete",
    )
    assert len(stream["producers"]) == len(stream["trainers"]) == 1
