"""What users set on a runner is part of the run: every kind of attribute, stopped and resumed in new processes, bitwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attributes import CASES, keep
from support.engines import needs_deepspeed
from support.processes import run_outcomes, run_processes

LAYOUTS = {"ddp-1": ("ddp", 1), "ddp-2": ("ddp", 2), "fsdp-2": ("fsdp", 2), "dcp-2": ("dcp", 2), "zero-2": ("zero", 2)}
WHAT = [*CASES, "weights", "requires_grad", "buffers", "ties"]

pytestmark = pytest.mark.timeout(300)


def _both(stack: str, root: str) -> dict[str, Any]:
    whole = keep(stack, f"{root}/whole")
    keep(stack, f"{root}/parts", {"epochs": 2})
    return whole


def _rest(stack: str, root: str, more: dict[str, Any] | None = None, constant: int = 1) -> dict[str, Any]:
    return keep(stack, f"{root}/parts", {"auto_resume": True, **(more or {})}, constant=constant)


@pytest.mark.parametrize(
    "layout",
    [
        "ddp-1",
        "ddp-2",
        "fsdp-2",
        pytest.param("dcp-2", marks=pytest.mark.slow),
        pytest.param("zero-2", marks=[pytest.mark.slow, needs_deepspeed]),
    ],
)
def test_a_resumed_run_has_what_the_uninterrupted_one_has(layout: str, tmp_path: Path) -> None:
    """Secrets, places and constants are those that the program sets anew."""
    stack, world_size = LAYOUTS[layout]
    ranks = run_processes(_both, stack, str(tmp_path), world_size=world_size, timeout=120)
    resumed = run_processes(_rest, stack, str(tmp_path), constant=2, world_size=world_size, timeout=120)
    for whole, parts in zip(ranks, resumed, strict=True):
        assert [what for what in WHAT if parts[what] != whole[what]] == []
        assert whole["requires_grad"] == [True] * 4 and whole["ties"] == [True, True]
        # Three epochs in one process, one in the other; a constant that the script sets anew stays new.
        tokens = [found["left out"][0].count("t") for found in (whole, parts)]
        assert tokens[0] - 1 == 3 * (tokens[1] - 1) and whole["left out"][1] == "here" + "/x" * (tokens[0] - 1)
        assert (whole["left out"][2], parts["left out"][2]) == (1, 2)


@pytest.mark.parametrize("stack", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_with_the_attributes_of_its_last_save(stack: str, tmp_path: Path) -> None:
    whole = run_processes(keep, stack, str(tmp_path / "whole"), timeout=120)
    killed = run_outcomes(keep, stack, str(tmp_path / "parts"), dies_at=5, timeout=120)
    assert any(outcome.exit_code == -9 for outcome in killed)
    parts = run_processes(_rest, stack, str(tmp_path), timeout=120)
    for what in WHAT:
        assert [each[what] for each in parts] == [each[what] for each in whole], what


def _refused(stack: str, root: str) -> str:
    with pytest.raises(Exception) as caught:
        _rest(stack, root, {"dataloader": {"batch_size": 8}})
    return str(caught.value)


def test_values_of_each_rank_are_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    run_processes(keep, "ddp", str(tmp_path / "parts"), {"epochs": 1}, timeout=120)
    (message,) = run_processes(_refused, "ddp", str(tmp_path), world_size=1, timeout=120)
    assert message.startswith("Expected 2 processes: the checkpoint has a value of self.by_rank for each of them.")
    assert "'attributes.by_rank' to checkpoint.exclude_from_loading" in message


def test_a_resume_with_other_threads_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()
    keep("ddp", str(tmp_path / "parts"), {"epochs": 1})
    try:
        torch.set_num_threads(threads + 1)
        with caplog.at_level(logging.WARNING, logger="danling"):
            keep("ddp", str(tmp_path / "parts"), {"epochs": 2, "auto_resume": True})
    finally:
        torch.set_num_threads(threads)
    (said,) = [record.getMessage() for record in caplog.records if "not bitwise" in record.getMessage()]
    assert said.endswith(f"threads {threads}, now {threads + 1}.")
