"""Speed, waiting and time left, on a clock that is set by hand."""

from __future__ import annotations

import pytest
import torch
from support.processes import run_processes
from torch import Tensor

from danling.distributed import Domain
from danling.reporting import Telemetry


class Clock:
    """A clock that goes when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def go(self, seconds: float) -> None:
        self.now += seconds


def run(telemetry: Telemetry, clock: Clock, updates: int, *, committed: bool = True) -> None:
    for _ in range(updates):
        telemetry.wait_started()
        clock.go(0.025)
        telemetry.wait_ended()
        clock.go(0.075)
        telemetry.stepped(tokens=320, committed=committed)


def test_figures_of_a_window() -> None:
    clock = Clock()
    telemetry = Telemetry(total_steps=100, global_step=10, clock=clock)
    run(telemetry, clock, 10)
    figures = telemetry.report(20, samples=320, learning_rates=[0.1, 0.2], grad_norm=torch.tensor(2.0))
    assert figures.pop("memory_host_gib") > 0
    assert figures == pytest.approx(
        {
            "step_seconds": 0.1,
            "samples_per_second": 320,
            "tokens_per_second": 3200,
            "data_share": 0.25,
            "learning_rate": 0.1,
            "learning_rate.1": 0.2,
            "grad_norm": 2.0,
            "skipped_updates": 0,
            "eta_seconds": 8.0,
        }
    )


def test_each_window_starts_anew_and_skipped_updates_add_up() -> None:
    clock = Clock()
    telemetry = Telemetry(clock=clock)
    run(telemetry, clock, 3, committed=False)
    assert telemetry.report(0)["skipped_updates"] == 3
    run(telemetry, clock, 1)
    figures = telemetry.report(1, samples=32)
    assert figures["skipped_updates"] == 3
    assert figures["samples_per_second"] == pytest.approx(320)
    assert "eta_seconds" not in figures
    assert "grad_norm" not in figures


def test_evaluation_counts_for_the_time_left_only() -> None:
    clock = Clock()
    telemetry = Telemetry(total_steps=20, clock=clock)
    run(telemetry, clock, 10)
    telemetry.pause()
    telemetry.pause()
    clock.go(4.0)
    telemetry.resume()
    clock.go(5.0)
    telemetry.resume()
    figures = telemetry.report(10)
    assert figures["step_seconds"] == pytest.approx(0.1)
    assert figures["eta_seconds"] == pytest.approx(10.0)
    assert telemetry.summary(10, 320) == (
        "10 updates to step 10 in 10.0 s: 10 updates/s, 320 samples/s, 25% waiting for data, 90% evaluating and saving, 0 skipped"
    )


def shares() -> tuple[float, float, set[str], int]:
    """Two ranks that read the same data wait 0.25 s and 0.5 s; only the first one's tokens count."""
    domain = Counting()
    clock = Clock()
    telemetry = Telemetry(clock=clock)
    run(telemetry, clock, 10 * (domain.rank + 1))
    shared = telemetry.share(domain, counts=domain.rank == 0)
    return shared.tokens, shared.waited, set(shared.memory), domain.collectives


class Counting(Domain):
    """Counts what it is asked to reduce."""

    collectives = 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self.collectives += 1
        return super().all_reduce(tensor, op)


def test_ranks_share_their_figures_in_one_collective() -> None:
    for tokens, waited, memory, collectives in run_processes(shares, init_process_group=True):
        assert (tokens, waited, memory, collectives) == (3200, pytest.approx(0.5), {"memory_host_gib"}, 1)
