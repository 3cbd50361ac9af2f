"""Speed, waiting and time left, on a clock that is set by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn

from danling import TorchRunner
from danling.distributed import Domain
from danling.reporting import Telemetry
from danling.runners.state import TrainState


class Watched:
    """A telemetry of a runner, with a clock that goes when told to."""

    def __init__(self, domain: Any = None, *, counts: bool = True, **train: int) -> None:
        self.now = 100.0
        self.train = TrainState(**train)
        self.runner: Any = SimpleNamespace(
            steps=100,
            world_size=1,
            stack="ddp",
            config=SimpleNamespace(compile=SimpleNamespace(enable=False)),
            device=torch.device("cpu"),
            state=SimpleNamespace(train=self.train),
            placement=SimpleNamespace(
                optimizer=domain or SimpleNamespace(size=1), counts_samples=counts
            ),
            count_tokens=lambda read: 320,
            flops_per_token=lambda: 10.0,
            flops_per_sample=lambda: None,
            peak_flops=lambda: 64_000.0,
        )
        self.telemetry = Telemetry(self.runner, clock=lambda: self.now)
        self.telemetry.begin(self.runner)

    def run(self, updates: int, *, committed: bool = True) -> None:
        for _ in range(updates):
            self.telemetry.batch_wait_started()
            self.now += 0.025
            self.telemetry.batch_wait_ended()
            self.telemetry.update_started()
            self.telemetry.micro_batch_started(None, read=None, samples=32)
            self.telemetry.micro_batch_ended()
            self.now += 0.075
            self.train.samples += 32
            self.train.global_step += committed
            self.telemetry.update_ended(SimpleNamespace(committed=committed))  # type: ignore[arg-type]

    def figures(self) -> dict[str, float]:
        return self.telemetry.report(self.runner)[0]


def test_figures_of_a_window() -> None:
    watched = Watched(global_step=10)
    watched.run(10)
    figures = watched.figures()
    assert figures.pop("memory_host_gib") > 0
    assert figures == pytest.approx(
        {
            "step_seconds": 0.1,
            "samples_per_second": 320,
            "tokens_per_second": 3200,
            "data_share": 0.25,
            "skipped_updates": 0,
            "eta_seconds": 8.0,
            "model_flops_per_second": 32_000,
            "mfu": 0.5,
        }
    )


def test_each_window_starts_anew_and_skipped_updates_add_up() -> None:
    watched = Watched()
    watched.run(3, committed=False)
    first = watched.figures()
    assert first["skipped_updates"] == 3 and "eta_seconds" not in first
    watched.run(1)
    figures = watched.figures()
    assert figures["skipped_updates"] == 3 and figures["samples_per_second"] == pytest.approx(320)


def test_evaluation_counts_for_the_time_left_only() -> None:
    watched = Watched()
    watched.run(10)
    watched.telemetry.evaluation_started("val")
    watched.telemetry.save_started()
    watched.now += 4.0
    watched.telemetry.save_ended()
    watched.now += 5.0
    watched.telemetry.evaluation_ended("val")
    figures = watched.figures()
    assert figures["step_seconds"] == pytest.approx(0.1) and figures[
        "eta_seconds"
    ] == pytest.approx(90.0)
    assert watched.telemetry.summary(watched.runner) == (
        "10 updates to step 10 in 10.0 s: 10 updates/s, 320 samples/s, 25% waiting for data, 90% evaluating and saving, 0 skipped"
    )


class Peaked(TorchRunner):
    def __init__(self, directory: Path) -> None:
        super().__init__(
            {"steps": 3, "accum_steps": 2, "dir": directory, "log": False, "optim.type": "sgd"}
        )
        self.model, self.criterion = nn.Linear(4, 2), nn.MSELoss()
        self.datasets = {"train": [(torch.ones(4), torch.ones(2))] * 8}

    def peak_flops(self) -> float:
        return 1e9


def test_flops_of_a_sample_are_counted_in_the_first_micro_batch_alone(tmp_path: Path) -> None:
    with Peaked(tmp_path) as runner:
        before = list(runner.observers)
        assert runner.flops_per_sample() is None
        runner.train()
        # A product of 4 x 2 has 8 multiplications and additions; the gradient of the weight has as many.
        assert runner.flops_per_sample() == 2 * 2 * 4 * 2
        assert set(runner.observers) <= set(before)


class Counting(Domain):
    """Counts what it is asked to reduce."""

    collectives = 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self.collectives += 1
        return super().all_reduce(tensor, op)


def shares() -> tuple[dict[str, float], list[list[float]], int]:
    """Two ranks that read the same data, of which one waits longer; only the first one's tokens count."""
    domain = Counting()
    watched = Watched(domain, counts=domain.rank == 0)
    watched.run(10)
    if domain.rank:
        watched.telemetry.waited += 0.25
    figures, rows = watched.telemetry.report(watched.runner, [float(domain.rank)])
    return figures, rows, domain.collectives


def test_ranks_share_their_figures_in_one_collective() -> None:
    for figures, rows, collectives in run_processes(shares, init_process_group=True):
        assert (figures["tokens_per_second"], figures["data_share"]) == (
            pytest.approx(3200),
            pytest.approx(0.5),
        )
        assert figures["memory_host_gib"] > 0 and rows == [[0.0], [1.0]] and collectives == 1
