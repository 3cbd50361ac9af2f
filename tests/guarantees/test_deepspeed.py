"""G5, G1 and G2 on DeepSpeed: the weights of the other stacks, and of the run that was not stopped."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import UNSAVED, AnyStackRunner, needs_deepspeed, settings, train, train_each, zero
from support.patience import patience
from support.processes import ProcessFailure, free_port, run_outcomes, run_processes
from support.programs import run_program
from support.toys import differences, whole_state
from torch import Tensor

pytestmark = needs_deepspeed

EXAMPLES = Path(__file__).parents[2] / "examples"


def close(first: Any, second: Any, *, atol: float = 1e-6) -> None:
    """Compare nested states: tensors and floats within a tolerance, the rest exactly."""
    if isinstance(first, Tensor):
        torch.testing.assert_close(second, first, rtol=1e-5, atol=atol)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            close(first[key], second[key], atol=atol)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        for a, b in zip(first, second):
            close(a, b, atol=atol)
    elif isinstance(first, float):
        assert second == pytest.approx(first, rel=1e-5, abs=atol)


@pytest.mark.timeout(300)
# One process divides nothing; engines on one are seen in tests/runners/test_deepspeed_runner.py.
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_stage_trains_as_torch_does(world_size: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {**UNSAVED, "ema": {"enabled": True, "decay": 0.9}}
    cases = [(settings(tmp_path / "ddp", "ddp", **changes), {})]
    cases += [(settings(tmp_path / str(stage), deepspeed=zero(stage), **changes), {}) for stage in range(4)]
    for ranks in run_processes(train_each, cases, world_size=world_size, timeout=240):
        reference = ranks[0]
        assert len(reference["trace"]) >= 5
        assert any(norm > 0.3 for _, _, norm in reference["trace"]), "clipping was never at work"
        assert len({weight for _, weight, _ in reference["trace"]}) > 1, "no ragged window"
        for found in ranks[1:]:
            close(reference["trace"], found["trace"])
            close(reference["results"], found["results"])
            for part in ("model", "ema", "optimizer", "scheduler"):
                close(reference["state"][part], found["state"][part])


@pytest.mark.timeout(300)
def test_bfloat16_and_offload(tmp_path: Path) -> None:
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    cases = [(settings(tmp_path / "ddp", "ddp", precision="bf16"), {}), (settings(tmp_path / "plain", "ddp"), {})]
    cases += [(settings(tmp_path / f"a{s}", precision="bf16", deepspeed=zero(s)), {}) for s in (0, 1, 3)]
    weights = [{"bf16": {"enabled": True}, **zero(stage)} for stage in (1, 2, 3)]
    bare = {"norm": False}
    cases += [(settings(tmp_path / f"w{i}", deepspeed=section), bare) for i, section in enumerate(weights)]
    cases += [(settings(tmp_path / f"o{s}", deepspeed=zero(s, **offloaded)), {}) for s in (1, 2, 3)]
    cases.append((settings(tmp_path / "bare", "ddp", precision="bf16"), bare))
    cases = [({**config, **UNSAVED, "epochs": 1}, options) for config, options in cases]
    found = run_processes(train_each, cases, world_size=2, timeout=240)[0]
    autocast, plain = found[:2]
    for case in found[2:5]:
        close(autocast["state"]["model"], case["state"]["model"], atol=2e-4)
    for case in found[5:8]:
        close(found[-1]["state"]["model"], case["state"]["model"], atol=2e-2)
    for case in found[8:-1]:
        close(plain["state"]["model"], case["state"]["model"])
        close(plain["trace"], case["trace"])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "stops"),
    [
        # By stage: within the first pass, and where the parameters are divided within the second one too. `make test-all` stops both at
        # more places.
        (2, {1: (1,), 3: (2, 4)}),
        pytest.param(2, {1: (1, 2, 4), 3: (1, 2, 4)}, marks=pytest.mark.slow),
        pytest.param(1, {1: (1, 2, 4), 3: (1, 2, 4)}, marks=pytest.mark.slow),
    ],
)
def test_stopped_at_every_step_and_resumed(world_size: int, stops: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
    changes = {"ema": {"enabled": True, "decay": 0.9}}
    for stage in stops:
        config = settings(tmp_path / f"whole{stage}", deepspeed=zero(stage), **changes)
        cases.append((config, {}))
        for stop in stops[stage]:
            parts = {**config, "workspace_root": str(tmp_path / f"{stage}-{stop}")}
            cases += [(parts, {"stop_at": stop}), ({**parts, "auto_resume": True}, {})]
    for ranks in run_processes(train_each, cases, world_size=world_size, timeout=280):
        found = iter(ranks)
        for stage in stops:
            whole = next(found)
            for _ in stops[stage]:
                first, second = next(found), next(found)
                assert first["trace"] + second["trace"] == whole["trace"]
                assert differences(second["state"], whole["state"]) == []
        assert next(found, None) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_an_engine_keeps_apart_is_saved_and_restored(tmp_path: Path) -> None:
    """Optimizers on the host, and weights in bfloat16 beside those that are updated."""
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    sections = [zero(1, **offloaded), zero(3, **offloaded), {"bf16": {"enabled": True}, **zero(2)}]
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number, section in enumerate(sections):
        how = {"norm": False}
        whole = settings(tmp_path / f"whole{number}", deepspeed=section, **UNSAVED)
        parts = settings(tmp_path / f"parts{number}", deepspeed=section)
        cases += [(whole, how), (parts, {**how, "stop_at": 4}), ({**parts, "auto_resume": True}, how)]
    for ranks in run_processes(train_each, cases, world_size=2, timeout=240):
        for whole, first, second in zip(ranks[::3], ranks[1::3], ranks[2::3]):
            assert len(first["trace"]) == 4
            assert first["trace"] + second["trace"] == whole["trace"]
            assert differences(second["state"], whole["state"]) == []


class SlowRunner(AnyStackRunner):
    """Takes its time over a step, so that a kill meets it at work."""

    def train_step(self, data: Any) -> Any:
        """Wait, then train."""
        time.sleep(0.05)
        return super().train_step(data)


def train_slowly(config: dict[str, Any]) -> dict[str, Any]:
    with SlowRunner(config) as runner:
        runner.train()
        return whole_state(runner)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", [1, 3])
def test_killed_and_resumed(stage: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 16, "checkpoint.keep_latest_k": 2, "auto_resume": True}
    config = settings(tmp_path / "whole", deepspeed=zero(stage), **changes)
    run_processes(free_port, world_size=2)  # what the first processes of a session have to load
    begin = time.monotonic()
    whole = run_processes(train_slowly, config, world_size=2, timeout=100)
    lasted = time.monotonic() - begin
    parts = {**config, "workspace_root": str(tmp_path / "parts")}
    kills = 0
    for share in (0.5, 0.6):
        # The harness waits longer on a busy machine; what the run that was left alone took has that in it already.
        outcomes = run_outcomes(train_slowly, parts, world_size=2, timeout=share * lasted / patience(1))
        kills += any(isinstance(outcome.error, ProcessFailure) for outcome in outcomes)
    ended = run_processes(train_slowly, parts, world_size=2, timeout=100)
    assert kills > 0
    for rank in range(2):
        assert differences(ended[rank], whole[rank]) == []
    assert not list(tmp_path.rglob(".staged-*"))


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r'"train/loss": ([\d.e+-]+)', output)]


@pytest.mark.timeout(300)
def test_one_script_on_every_stack(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat; a dog lay in the sun. " * 200)
    small = ["--model.width", "16", "--model.depth", "1", "--model.context", "16", "--data.path", str(text)]
    found = {}
    stacks = {
        "ddp": ["ddp"],
        "parallel": ["parallel", "--parallel.axes.shard", "2"],
        "deepspeed": ["deepspeed", "--deepspeed.zero_optimization.stage", "2"],
        "accelerate": ["accelerate"],
    }
    # Evaluated and saved once: not after every update, as the twentieth part of so few would be.
    once = ["--evaluate_interval", "10", "--checkpoint.interval", "10"]
    for name, stack in stacks.items():
        root = tmp_path / name
        options = ["--steps", "10", "--log_interval", "1", "--workspace_root", str(root), *once, *small]
        arguments = ("--stack", *stack, *options)
        exit_code, output = run_program(EXAMPLES / "gpt.py", *arguments, nproc_per_node=2, timeout=140)
        assert exit_code == 0, output
        (metrics,) = root.rglob("metrics.jsonl")
        found[name] = losses(metrics.read_text())
    assert len(found["ddp"]) == 10
    assert found["parallel"] == pytest.approx(found["ddp"], rel=1e-4)
    assert found["deepspeed"] == pytest.approx(found["ddp"], rel=1e-4)
    assert found["accelerate"] == found["ddp"]
    assert found["ddp"][-1] < found["ddp"][0]


@pytest.mark.slow
def test_a_single_run_is_the_same_without_the_others(tmp_path: Path) -> None:
    """What the tests above share a process for does not reach from one run to the next."""
    config = settings(tmp_path / "a", deepspeed=zero(3))
    alone = run_processes(train, config, world_size=1)[0]
    other = {**config, "workspace_root": str(tmp_path / "b")}
    after = run_processes(train_each, [(settings(tmp_path / "c", deepspeed=zero(1)), {}), (other, {})], world_size=1)
    assert differences(alone["state"], after[0][1]["state"]) == []
