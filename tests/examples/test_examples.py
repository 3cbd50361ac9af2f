"""The examples as their docstrings say to start them, on one process and under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.kill import run_python
from support.torchrun import run_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


def accuracy(output: str) -> float:
    found = re.search(r"test accuracy (\d\.\d+)", output)
    assert found is not None, output
    return float(found[1])


def test_digits_on_one_process_and_further() -> None:
    code, output = run_python(EXAMPLES / "digits.py", "--epochs", "4")
    assert code == 0 and accuracy(output) >= 0.95, output
    code, output = run_python(EXAMPLES / "digits.py", "--epochs", "5", "--auto_resume", "true")
    assert code == 0 and "epoch 4" in output and accuracy(output) >= 0.95, output


def test_digits_under_torchrun() -> None:
    code, output = run_torchrun(EXAMPLES / "digits.py", nproc_per_node=2)
    assert code == 0 and accuracy(output) >= 0.95, output


@pytest.mark.parametrize("world_size", [1, 2])
def test_gpt_learns_goes_on_and_leaves_its_files(world_size: int) -> None:
    small = ["--model.width", "32", "--model.depth", "1", "--model.context", "32", "--evaluate_interval", "20"]

    def run(*args: str) -> str:
        script = EXAMPLES / "gpt.py"
        done = (
            run_python(script, *small, *args)
            if world_size == 1
            else run_torchrun(script, *small, *args, nproc_per_node=2)
        )
        assert done.exit_code == 0, done.output
        return done.output

    assert "bits is the entropy of single characters" in run("--steps", "40")
    output = run("--steps", "60", "--auto_resume", "true")
    assert "at step 40" in output and "after 60 steps" in output
    latest = next(Path("experiments").rglob("latest.pth"))
    assert torch.load(latest, weights_only=True)["state"]["train"]["global_step"] == 60
    assert {path.name for path in latest.parents[1].iterdir()} >= {"logs", "metadata", "results.json", "metrics.jsonl"}
