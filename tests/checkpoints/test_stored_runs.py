"""Checkpoints of whole runs that earlier code has written: each stack resumes its own, and ends as a run that was never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import AnyStackRunner, needs_deepspeed, settings, zero
from support.processes import run_processes

FIXTURES = Path(__file__).parent / "fixtures" / "v1"


def configuration(root: Path, stack: str) -> dict[str, Any]:
    """Return the configuration that the stored runs had, in a directory of its own."""
    changes: dict[str, Any] = {"ema": {"enabled": True, "decay": 0.9}, "checkpoint": {"async_mode": "disabled"}}
    if stack == "deepspeed":
        changes["deepspeed"] = zero(1)
    return settings(root, stack, **changes)


def finished(config: dict[str, Any]) -> dict[str, Any]:
    """Train to the end and return what the whole state says, less the attempts."""
    with AnyStackRunner(config, scaled=config["stack"] != "deepspeed") as runner:
        runner.train()
        state = runner.state_dict()
        kept = ("model", "ema", "optimizer", "scheduler", "criterion", "dataloaders")
        found = {name: state[name] for name in kept if name in state}
        return {**found, "train": state["state"]["train"], "results": state["state"]["results"]}


def resumed_and_whole(root: str, kind: str, stack: str) -> list[dict[str, Any]]:
    """Return the end of a run that goes on from a stored one, and of one that was never stopped."""
    stored = Path(root) / kind
    shutil.copytree(FIXTURES / kind, stored)
    source = stored / ("latest.pth" if kind == "run-file" else "latest")
    resumed = finished({**configuration(Path(root) / "resumed", stack), "resume": str(source)})
    return [resumed, finished(configuration(Path(root) / "whole", stack))]


def assert_like(found: Any, expected: Any) -> None:
    """Compare nested states: tensors and numbers but for rounding, everything else exactly."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_like(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_like(one, other)
    elif isinstance(expected, (torch.Tensor, float)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert found == expected


def check(root: Path, kind: str, stack: str) -> None:
    """Compare to what another machine's rounding leaves equal."""
    resumed, whole = run_processes(resumed_and_whole, str(root), kind, stack, world_size=1, timeout=100)[0]
    assert whole["train"]["global_step"] == resumed["train"]["global_step"] == 10
    assert_like(resumed, whole)


@pytest.mark.parametrize(("kind", "stack"), [("run-file", "ddp"), ("run-sharded", "parallel")])
def test_a_stored_run_goes_on(tmp_path: Path, kind: str, stack: str) -> None:
    check(tmp_path, kind, stack)


@needs_deepspeed
@pytest.mark.timeout(150)
def test_a_stored_run_of_an_engine_goes_on(tmp_path: Path) -> None:
    check(tmp_path, "run-engine", "deepspeed")
