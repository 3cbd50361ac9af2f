"""Operations that give other bits are found by making them again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from support.recorded import danling
from torch import Tensor

from danling.cli import repeatability_job as job
from danling.cli.repeatability import JOB, REPEATS, examine_repeatability, verdict


def drawn(draws: job.Draws) -> tuple[Tensor, ...]:
    """Other bits each time, whatever kernels are chosen."""
    return (torch.rand(3),)


def mended(draws: job.Draws) -> tuple[Tensor, ...]:
    """Other bits, but with deterministic kernels."""
    return (torch.zeros(3) if torch.are_deterministic_algorithms_enabled() else torch.rand(3),)


def refused(draws: job.Draws) -> tuple[Tensor, ...]:
    """Other bits, and an error with deterministic kernels."""
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("refused has no deterministic kernel")
    return (torch.rand(3),)


def absent(draws: job.Draws) -> tuple[Tensor, ...]:
    """Nothing at all."""
    raise RuntimeError("no kernel")


def threads(draws: job.Draws) -> tuple[Tensor, ...]:
    """Bits of the number of threads."""
    return (torch.tensor(torch.get_num_threads()),)


class Backward(torch.autograd.Function):
    """The same output each time, and another gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.rand(())


def gradient(draws: job.Draws) -> tuple[Tensor, ...]:
    """Other bits in the gradient alone."""
    values = draws.values(3)
    return values, Backward.apply(values)


PLANTED = {each.__name__: each for each in (drawn, mended, refused, absent, threads, gradient)}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Sequence[str]], str]]:
    """Runs the job in this process, with what is planted among its operations."""
    monkeypatch.setattr(job, "OPERATIONS", {**job.OPERATIONS, **PLANTED})
    before = torch.get_num_threads()

    def ask(arguments: Sequence[str]) -> str:
        assert arguments[:2] == ["-m", JOB]
        torch.set_num_threads(before)
        with redirect_stdout(io.StringIO()) as said:
            job.main(arguments[2:])
        return said.getvalue()

    yield ask
    torch.set_num_threads(before)


def test_what_varies_is_told_from_what_does_not(ask: Callable[[Sequence[str]], str]) -> None:
    only = [*PLANTED, "index_add"]
    found = {name.split(" (")[0]: (state, detail) for name, state, detail in examine_repeatability(ask, only)}
    assert found["drawn"][0] == "failed" and "do without" in found["drawn"][1]
    assert found["gradient"][0] == "failed"
    assert found["mended"] == (
        "varies",
        f"{2 * REPEATS - 1} of {2 * REPEATS} repetitions have other bits; none with deterministic=true",
    )
    assert found["refused"][0] == "varies" and found["refused"][1].endswith("refused has no deterministic kernel")
    assert found["absent"] == ("absent", "does not run here: no kernel")
    assert found["threads"][0] == "ok" and "keep OMP_NUM_THREADS" in found["threads"][1]
    assert found["index_add"][0] == "ok"


def test_two_processes_that_differ_vary() -> None:
    state, detail = verdict([{"digests": ["a"] * 3}, {"digests": ["b"] * 3}], {"digests": ["a"] * 3}, None, 2, 1)
    assert (state, detail) == ("varies", "3 of 6 repetitions have other bits; none with deterministic=true")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_operation_of_this_machine_varies_with_deterministic_kernels() -> None:
    done = danling("doctor", "--determinism", "--json", timeout=580)
    checks = json.loads(done.stdout)["checks"]
    assert len(checks) >= 30 and not [check for check in checks if check["state"] in ("failed", "absent")], done.stdout
    assert done.returncode == 0
