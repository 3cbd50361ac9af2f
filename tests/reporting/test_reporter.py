"""What a training reports, on runners that train: metrics and speed, results, pauses, trackers, and how it ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.reporting import read_jsonl
from danling.reporting.reporter import hints_of_threads
from danling.reporting.trackers import BUILT_IN_TRACKERS, TensorBoardTracker
from danling.utils.observers import Observer


class Noted:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.flushes = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Keep it."""
        self.lines.append((step, dict(values)))

    def flush(self) -> None:
        """Count it."""
        self.flushes += 1

    def close(self) -> None:
        """Have nothing to close."""


class Small(dl.TorchRunner):
    """A linear model on sixteen samples of four numbers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        self.datasets = {"train": data, "val": data}
        self.model, self.criterion = nn.Linear(4, 1), nn.MSELoss()
        self.noted = Noted()
        self.add_tracker(self.noted)

    def count_tokens(self, data: Any) -> float:
        return 3.0 * len(data[0])


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    fixed = {"dir": str(directory), "seed": 1, "log_interval": 2, "dataloader": {"batch_size": 4}}
    return {**fixed, "optim": {"type": "sgd", "lr": 0.1}, **more}


def test_updates_and_results_are_logged_with_their_metrics_and_speed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "danling"),
        Small(settings(tmp_path, epochs=2, accum_steps=2)) as runner,
    ):
        runner.train()
    updates = [(step, values) for step, values in runner.noted.lines if "train/loss" in values]
    assert [step for step, _ in updates] == [2, 4]
    for _, values in updates:
        seconds = values["train/step_seconds"] * 2
        assert values["train/samples_per_second"] * seconds == pytest.approx(16)
        assert values["train/tokens_per_second"] * seconds == pytest.approx(48)
        assert values["train/learning_rate"] == 0.1 and values["train/skipped_updates"] == 0
    results = [values for _, values in runner.noted.lines if "val/loss" in values]
    assert len(results) == 2 and set(results[0]) == {"train_mean/loss", "val/loss"}
    assert "Training from step 0 (epoch 0) to epoch 2 on 1 cpu process (ddp, fp32)" in caplog.text
    assert "5 parameters, batch 4 x 2 micro-batches" in caplog.text
    assert any(text.startswith("epoch 1/2 2/4 (50%)  loss") for text in caplog.messages)
    assert "epoch 2: train loss" in caplog.text
    assert "Finished: 4 updates to step 4" in caplog.text


@pytest.mark.parametrize(
    ("more", "head"),
    [
        ({"steps": 4}, "step 2/4 (50%)"),
        ({"steps": 4, "experiment": "mine"}, "mine 2/4 (50%)"),
        ({"epochs": 1, "experiment": "mine"}, "mine epoch 1/1 2/4 (50%)"),
    ],
)
def test_lines_begin_with_the_experiment_only_if_it_has_a_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], head: str
) -> None:
    with (
        caplog.at_level(logging.INFO, "danling"),
        Small(settings(tmp_path, log_seconds=0, **more)) as runner,
    ):
        runner.train()
    assert any(text.startswith(f"{head}  loss") for text in caplog.messages), caplog.messages


def test_epoch_on_the_bar_is_the_evaluated_and_saved_one(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    class Watched(Small):
        def on_pass_start(self, split: str) -> None:
            seen.append(("pass", self._parts.reporter.bar.epoch))

        def evaluate_epoch(self, split: str) -> dict[str, float]:
            seen.append(("evaluation", self._parts.reporter.bar.epoch))
            return super().evaluate_epoch(split)

        def save_checkpoint(self, **more: Any) -> None:
            seen.append(("save", self._parts.reporter.bar.epoch))
            super().save_checkpoint(**more)

    with Watched(settings(tmp_path, epochs=2)) as runner:
        runner.train()
    wanted = [
        (what, f"epoch {epoch}/2") for epoch in (1, 2) for what in ("pass", "evaluation", "save")
    ]
    assert [each for each in seen if each in wanted] == list(dict.fromkeys(seen)) == wanted


def test_summed_loss_is_logged_as_the_sum(tmp_path: Path) -> None:
    with Small(
        settings(tmp_path, steps=1, log_interval=1, dataloader={"batch_size": 16})
    ) as runner:
        runner.criterion = nn.MSELoss(reduction="sum")
        inputs, targets = runner.datasets["train"].tensors
        wanted = float(
            nn.functional.mse_loss(runner.model(inputs), targets, reduction="sum").detach()
        )
        runner.train()
    logged = next(
        values["train/loss"] for _, values in runner.noted.lines if "train/loss" in values
    )
    assert logged == pytest.approx(wanted, rel=1e-5)


def test_results_are_printed_at_their_pace_and_the_last_one_always(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Small(settings(tmp_path, steps=150, log_seconds=3600.0)) as runner:
        reporter = runner._parts.reporter
        reporter.begin(runner, runner._parts.update, sums_loss=False)
        caplog.clear()
        with caplog.at_level(logging.INFO, "danling"):
            for step in range(150):
                runner.state.train.global_step = step
                reporter.log_result(runner, {"val": {"loss": 1.0}}, last=step == 149)
        reporter.end()
        runner.state.train.global_step = 0
    printed = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert printed == [f"step {index}" for index in (*range(100), 149)]


class Retried(Small):
    """Computes the micro-batches of its second update twice."""

    def step(self) -> Any:
        if self.state.train.global_step == 1 and not self.carry:
            self.carry = torch.ones(1)
            self.window.reset()
            self.reduction.zero()
            batch = next(iter(self.build_dataloader("train", self.datasets["train"])))
            self.train_step(batch)
        return super().step()


def test_recomputed_micro_batches_count_once(tmp_path: Path) -> None:
    with Retried(settings(tmp_path, steps=2)) as runner:
        runner.train()
    (values,) = [values for _, values in runner.noted.lines if "train/loss" in values]
    assert values["train/tokens_per_second"] * values["train/step_seconds"] * 2 == pytest.approx(24)


def test_unreadable_files_do_not_hide_the_end_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Small(settings(tmp_path / "run", steps=1)) as runner:
        runner.train()
        runner._parts.reporter.begin(runner, runner._parts.update, sums_loss=False)
        (gone := tmp_path / "gone").mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with caplog.at_level(logging.INFO, "danling"):
            runner._parts.reporter.log_end("Finished")
        runner._parts.reporter.end()
        monkeypatch.chdir(tmp_path)
    assert "Finished: " in caplog.text and "cannot be read: [Errno 2]" in caplog.text


class Broken(Observer):
    """Fails in its first update."""

    def __init__(self) -> None:
        self.updates = 0

    def update_ended(self, outcome: Any) -> None:
        self.updates += 1
        raise RuntimeError("out of order")


def test_failing_observer_is_dropped_and_a_critical_one_ends_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Small(settings(tmp_path / "run", steps=3)) as runner:
        broken = Broken()
        runner.observers.append(broken)
        runner.train()
    assert broken.updates == 1 and broken not in runner.observers and "out of order" in caplog.text
    critical = type("Critical", (Broken,), {"critical": True})
    with (
        Small(settings(tmp_path / "other", steps=3)) as runner,
        pytest.raises(RuntimeError, match="out of order"),
    ):
        runner.observers.append(critical())
        runner.train()


# The table of trackers


class Hooked(Small):
    """Has a hook that does nothing in the place of a tracker of the library."""

    asked = 0

    def init_tensorboard(self) -> None:
        self.asked += 1


def test_a_hook_stands_in_for_a_tracker_of_the_library_and_is_called_once(tmp_path: Path) -> None:
    with Hooked(settings(tmp_path, steps=1, tensorboard=True)) as runner:
        runner.train()
        runner.open_trackers()
        assert [type(tracker).__name__ for tracker in runner.trackers] == ["Noted", "JsonlTracker"]
    assert runner.asked == 1 and read_jsonl(tmp_path / "metrics.jsonl")


def test_a_resumed_run_goes_on_in_the_directory_of_its_last_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    earlier = tmp_path / "tensorboard" / "2025-12-31"
    earlier.mkdir(parents=True)
    with Small(settings(tmp_path, steps=9, tensorboard=True)) as runner:
        runner.state.train.global_step = 5
        tracker = BUILT_IN_TRACKERS["tensorboard"](runner)
        assert isinstance(tracker, TensorBoardTracker)
        tracker.close()
    assert (
        len(list(earlier.iterdir())) == 1 and len(list((tmp_path / "tensorboard").iterdir())) == 1
    )
    assert not [thread for thread in threading.enumerate() if "EventLogger" in thread.name]


@pytest.mark.parametrize(
    ("threads", "load", "cores", "said"),
    [(1, 9.0, 2, 0), (2, 1.5, 2, 0), (2, 9.0, 2, 1), (8, 9.0, 16, 0)],
)
def test_threads_that_share_cores_with_other_programs_are_named(
    threads: int, load: float, cores: int, said: int
) -> None:
    lines = hints_of_threads(threads, load=load, cores=cores)
    assert len(lines) == said
    assert all("OMP_NUM_THREADS=1" in line and len(line) <= 100 for line in lines)
