"""The reporter of a run by itself: what is sent where, what is measured, and what is said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from danling.config import RunnerConfig
from danling.distributed import LocalDomain
from danling.reporting import (
    BUILT_IN_TRACKERS,
    JsonlTracker,
    ModelFlops,
    Reporter,
    TensorBoardTracker,
    TrackerPlace,
    describe_batches,
    describe_parameters,
    describe_training,
    read_jsonl,
)
from danling.reporting.summary import shown
from danling.workspace import Workspace

CPU = torch.device("cpu")


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


class Profiled:
    """Counts the updates that it is told of."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = 0

    def step(self, global_step: int) -> None:
        """Count one."""
        self.steps.append(global_step)

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def begun(*, is_main: bool = True, profiler: Any = None, samples: int = 0) -> tuple[Reporter, Noted]:
    reporter, noted = Reporter(is_main=is_main, world_size=1, seconds_between_lines=0.0), Noted()
    reporter.trackers.add(noted)
    reporter.trackers.open()
    reporter.begin(
        step=0, samples=samples, total_steps=10, device=CPU, name="exp", epoch="epoch 1/2", profiler=profiler
    )
    return reporter, noted


def log(reporter: Reporter, step: int, samples: int, *, domain: Any = None, **more: Any) -> None:
    given: dict[str, Any] = {"loss": 0.5, "grad_norm": torch.tensor(2.0), "learning_rates": [0.1, 0.2]}
    reporter.log_update(
        step,
        samples=samples,
        epoch="epoch 2/2",
        domain=domain or LocalDomain(),
        counts_samples=True,
        per_token=lambda: None,
        per_sample=lambda: None,
        **{**given, **more},
    )


def test_an_update_is_logged_with_its_metrics_and_speed(caplog: pytest.LogCaptureFixture) -> None:
    reporter, noted = begun(samples=100)
    assert reporter.telemetry is not None
    reporter.telemetry.stepped(committed=True)
    with caplog.at_level(logging.INFO, "danling"):
        log(reporter, 5, 132, loss=torch.tensor(0.5))
    reporter.end()
    ((step, values),) = noted.lines
    assert step == 5 and values["train/loss"] == 0.5 and values["train/grad_norm"] == 2.0
    assert (values["train/learning_rate"], values["train/learning_rate.1"]) == (0.1, 0.2)
    # 32 samples since the training began, in the time of one update
    assert values["train/samples_per_second"] * values["train/step_seconds"] == pytest.approx(32)
    assert "exp epoch 2/2 5/10 (50%)  loss 0.5000  grad_norm 2.0000  lr 0.1000" in caplog.text


def test_samples_are_counted_from_the_last_line_or_from_a_jump() -> None:
    reporter, noted = begun()
    assert reporter.telemetry is not None
    seen = []
    for samples, jump in ((8, None), (20, None), (1020, 1000)):
        reporter.telemetry.stepped(committed=True)
        if jump is not None:
            reporter.forget_samples(jump)
        log(reporter, 1, samples)
        values = noted.lines[-1][1]
        seen.append(round(values["train/samples_per_second"] * values["train/step_seconds"]))
    reporter.end()
    assert seen == [8, 12, 20]


def test_another_process_than_the_main_one_sends_nothing_and_takes_part() -> None:
    class Pair(LocalDomain):
        """Two ranks, of which the other has nothing to tell."""

        def __init__(self) -> None:
            super().__init__()
            self.size, self.reduced = 2, 0

        def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            """Count it."""
            self.reduced += 1
            return tensor

    domain = Pair()
    reporter, noted = begun(is_main=False)
    log(reporter, 1, 8, domain=domain)
    reporter.log_result({"val": {"loss": 1.0}}, step=1, title="step 1", trained=[], last=True)
    assert domain.reduced == 1 and noted.lines == [] and reporter.bar is None


def test_a_result_is_told_by_split_and_the_mean_of_a_pass_has_a_key_of_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reporter, noted = begun()
    result = {"train": {"loss": 0.25}, "val": {"loss": 0.5, "accuracy": 1.0}}
    with caplog.at_level(logging.INFO, "danling"):
        reporter.log_result(result, step=7, title="epoch 2", trained=["train"], last=False)
    reporter.end()
    assert noted.lines == [(7, {"train_mean/loss": 0.25, "val/loss": 0.5, "val/accuracy": 1.0})]
    assert "epoch 2: train loss 0.2500  val loss 0.5000  accuracy 1.0000" in caplog.text


def test_results_are_printed_at_their_pace_and_the_last_one_always(caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(is_main=True, world_size=1, seconds_between_lines=3600.0)
    with caplog.at_level(logging.INFO, "danling"):
        for index in range(150):
            reporter.log_result(
                {"val": {"loss": 1.0}}, step=index, title=f"step {index}", trained=[], last=index == 149
            )
    printed = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert printed == [f"step {index}" for index in (*range(100), 149)]


def test_a_pause_is_no_time_of_training_and_profiles_count_every_update() -> None:
    profiled = Profiled()
    reporter, noted = begun(profiler=profiled)
    assert reporter.telemetry is not None
    now = 100.0
    reporter.telemetry.clock = lambda: now
    reporter.telemetry.open_window()
    for step in (1, 1, 2):
        now += 1.0
        reporter.telemetry.stepped(committed=True)
        reporter.stepped(step)
    with reporter.aside("checkpoint"):
        now += 500.0
    log(reporter, 2, 3)
    reporter.end()
    reporter.end()
    assert noted.lines[0][1]["train/step_seconds"] == pytest.approx(1.0)
    assert (profiled.steps, profiled.closed) == ([1, 1, 2], 1)


def test_the_ending_names_what_this_training_did(caplog: pytest.LogCaptureFixture) -> None:
    reporter, _ = begun(samples=50)
    assert reporter.telemetry is not None
    reporter.telemetry.stepped(committed=False)
    with caplog.at_level(logging.INFO, "danling"):
        reporter.log_ending("Stopped by SIGTERM", step=4, samples=60)
    reporter.end()
    assert "Stopped by SIGTERM: 1 update to step 4" in caplog.text and "1 skipped" in caplog.text


def test_files_that_cannot_be_looked_up_do_not_hide_how_a_training_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reporter, _ = begun()
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with caplog.at_level(logging.INFO, "danling"):
        reporter.log_ending("Finished", step=4, samples=60, summary=lambda: [shown(tmp_path)])
    reporter.end()
    assert "Finished: " in caplog.text and "cannot be looked up: [Errno 2]" in caplog.text


def test_a_tracker_that_cannot_be_flushed_does_not_hide_how_a_training_ended(caplog: pytest.LogCaptureFixture) -> None:
    class Deaf(Noted):
        """Cannot be flushed."""

        def flush(self) -> None:
            """Fail."""
            raise OSError("disk full")

    reporter, noted = begun()
    reporter.trackers.add(Deaf())
    reporter.flush()
    reporter.end()
    assert noted.flushes == 1 and "disk full" in caplog.text


# The table of trackers


def place(root: Path, step: int = 0, **settings: Any) -> TrackerPlace:
    config = RunnerConfig(settings)
    files = Workspace(lineage="lin", id="abc", timestamp="2026-01-01", dir=root)
    return TrackerPlace(config, files, "abc-2", step)


def test_trackers_are_opened_where_the_configuration_asks_for_them(tmp_path: Path) -> None:
    wanted = [name for name, row in BUILT_IN_TRACKERS.items() if row.wanted(place(tmp_path).config)]
    enabled = {name: {"enabled": True} for name in ("wandb", "mlflow", "trackio")}
    asked = place(tmp_path, tensorboard=True, **enabled).config
    assert wanted == ["jsonl"]
    assert [name for name, row in BUILT_IN_TRACKERS.items() if row.wanted(asked)] == list(BUILT_IN_TRACKERS)
    reporter = Reporter(is_main=True, world_size=1, seconds_between_lines=0.0)
    for name in ("jsonl", "tensorboard"):
        reporter.add_built_in(name, place(tmp_path))
    reporter.trackers.open()
    assert [type(tracker) for tracker in reporter.trackers.opened] == [JsonlTracker]
    reporter.trackers.log({"a": 1.0}, 3)
    reporter.trackers.close()
    assert [(line["step"], line["a"]) for line in read_jsonl(tmp_path / "metrics.jsonl")] == [(3, 1.0)]


def test_trackers_of_the_library_are_opened_by_their_hooks_where_there_are_some_and_once(tmp_path: Path) -> None:
    reporter, asked = Reporter(is_main=True, world_size=1, seconds_between_lines=0.0), list[str]()
    hooks = {"tensorboard": lambda: asked.append("tensorboard")}
    for _ in range(2):
        reporter.open_trackers(hooks.get, lambda: place(tmp_path, tensorboard=True))
    assert asked == ["tensorboard"]  # a hook that does nothing is asked too, and then there is no such tracker
    assert [type(tracker).__name__ for tracker in reporter.trackers.opened] == ["JsonlTracker"]
    reporter.trackers.close()


def test_a_resumed_run_goes_on_in_the_directory_of_its_last_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    earlier = tmp_path / "tensorboard" / "2025-12-31"
    earlier.mkdir(parents=True)
    tracker = BUILT_IN_TRACKERS["tensorboard"].open(place(tmp_path, step=5, tensorboard=True))
    assert isinstance(tracker, TensorBoardTracker)
    tracker.close()
    assert len(list(earlier.iterdir())) == 1 and not (tmp_path / "tensorboard" / "2026-01-01").exists()
    assert not [thread for thread in threading.enumerate() if "EventLogger" in thread.name]


# FLOPs of the model


def test_flops_are_counted_once_and_only_where_there_is_a_peak_to_compare_with() -> None:
    weight = torch.randn(4, 6)
    flops = ModelFlops()
    flops.begin(None, known=False, countable=True)
    assert not flops.counts_next
    flops.begin(1e3, known=True, countable=True)
    assert not flops.counts_next
    flops.begin(1e3, known=False, countable=True)
    flops.count(lambda: torch.randn(8, 4) @ weight, 8)
    assert flops.counted == 2 * 4 * 6 and not flops.counts_next


def test_usage_goes_by_tokens_where_their_flops_are_known_else_by_samples() -> None:
    flops, pace = ModelFlops(), {"tokens_per_second": 50.0, "samples_per_second": 5.0}
    assert flops.usage(pace, per_token=None, per_sample=None, devices=2) == {}
    assert flops.usage(pace, per_token=6.0, per_sample=9.0, devices=2) == {"model_flops_per_second": 300.0}
    flops.peak = 1e3
    usage = flops.usage(pace, per_token=None, per_sample=9.0, devices=2)
    assert usage == {"model_flops_per_second": 45.0, "mfu": 45.0 / 2e3}


# What is said at the beginning


def test_a_training_is_described_in_lines_that_fit_a_terminal(tmp_path: Path) -> None:
    class Division:
        samples = 64
        is_even = False

    assert describe_parameters([(10, True), (5, True)]) == "15 parameters"
    assert describe_batches(None, 1) == ""
    assert describe_batches(8, 1) == "batch 8"
    batches = describe_batches(8, 4, Division(), distributed=True)
    assert batches == "64 samples an update, at most 8 x 4 micro-batches on each"
    lines = describe_training(
        step=3,
        epoch=1,
        budget="epoch 2",
        processes="2 cpu processes",
        stack="ddp, fp32",
        parameters="15 parameters",
        batches=batches,
        directory=tmp_path,
    )
    assert lines == [
        "Training from step 3 (epoch 1) to epoch 2 on 2 cpu processes (ddp, fp32)",
        "15 parameters, 64 samples an update, at most 8 x 4 micro-batches on each",
        f"Run directory: {tmp_path}",
    ]
    assert all(len(line) <= 120 - len("17:40:23 ") for line in lines[:-1])
