"""The smaller examples as programs: short runs, and what each of them is there to show."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import number_in, run_program

import danling as dl

EXAMPLES = Path(__file__).parents[2] / "examples"


def latest_of(lineage: str) -> dict[str, Any]:
    (file,) = Path(f"experiments/{lineage}").glob("*/checkpoints/latest.pth")
    payload: dict[str, Any] = torch.load(file, weights_only=True)
    return payload


def test_finetune_freezes_and_groups(run_example: Callable[..., str]) -> None:
    output = run_example("finetune", "--epochs", "12", "--workspace_root", "experiments")
    assert number_in(output, r"finetuned: test accuracy (\S+)") > number_in(output, r"scratch: test accuracy (\S+)")
    state = latest_of("finetune")["optimizer"]
    groups = {tuple(group["params"]): group for group in state["param_groups"]}
    assert not any("first" in name for names in groups for name in names)
    rate = groups[("head.weight",)]["lr"]
    assert groups[("second.weight",)]["lr"] == pytest.approx(rate / 10)
    assert groups[("second.bias", "head.bias")]["weight_decay"] == 0.0


def test_early_stop_ends_before_its_budget_and_keeps_the_average(run_example: Callable[..., str]) -> None:
    output = run_example("early_stop")
    stopped = number_in(output, r"stopped after epoch (\d+)")
    best = number_in(output, r"the best was epoch (\d+)")
    assert stopped == best + 8
    assert number_in(output, r"at a rate of (\S+);") < 5e-3
    assert number_in(output, r"averaged weights (\S+)") > 0.85
    assert set(latest_of("early_stop")["ema"]["weights"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_stream_goes_on_bitwise_where_it_was(run_example: Callable[..., str]) -> None:
    steps = ("--scheduler.total_steps", "60", "--evaluate_interval", "20")
    run_example("streaming", "--steps", "60", *steps, "--dir", "whole")
    run_example("streaming", "--steps", "35", *steps, "--dir", "parts")
    resumed = run_example("streaming", "--steps", "60", *steps, "--dir", "parts", "--auto_resume", "true")
    assert "Resumed from" in resumed
    assert "cannot be positioned" not in resumed
    whole, parts = (torch.load(f"{name}/checkpoints/latest.pth", weights_only=True) for name in ("whole", "parts"))
    assert whole["state"]["train"]["samples"] == parts["state"]["train"]["samples"] == 60 * 64
    assert all(torch.equal(weight, parts["model"][name]) for name, weight in whole["model"].items())


def test_actor_and_critics_resume_bitwise(tmp_path: Path) -> None:
    runner_class = runpy.run_path(str(EXAMPLES / "actor_critic.py"))["TD3"]

    def trained(name: str, **more: Any) -> Any:
        given = {"seed": 1, "steps": 6, "dir": str(tmp_path / name), "log": False, "dataloader.batch_size": 32}
        with runner_class(dl.RunnerConfig({**given, **more})) as runner:
            runner.train()
            return [*runner.unwrapped_model.parameters(), *runner.target.parameters()]

    whole = trained("whole")
    trained("parts", steps=3)
    assert all(map(torch.equal, whole, trained("parts", auto_resume=True)))


def test_gan_learns_on_two_processes() -> None:
    args = ("--steps", "200", "--evaluate_interval", "100", "--dataloader.batch_size", "16", "--ema.enabled", "false")
    exit_code, output = run_program(EXAMPLES / "gan.py", *args, "--checkpoint.interval", "100", nproc_per_node=2)
    assert exit_code == 0, output
    assert number_in(output, r"distance (\S+) at") < 0.9 * number_in(output, r", (\S+) untrained")
    assert output.count("untrained") == 1


def test_uneven_shards_end_together_and_are_evaluated_whole() -> None:
    exit_code, output = run_program(EXAMPLES / "uneven.py", nproc_per_node=2)
    assert exit_code == 0, output
    assert "this pass ends early on rank 0" in output
    # 300 samples are 19 batches of at most 16, the last one of 12 beside a full one on the other rank.
    assert "3020 samples in 95 updates" in output
    assert number_in(output, r"validation accuracy (\S+)") > 0.85
