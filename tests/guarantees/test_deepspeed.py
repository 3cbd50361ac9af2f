"""G5, G1 and G2 on DeepSpeed: the weights of the other stacks, and of the run that was not stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.stacks import UNSAVED, needs_deepspeed, settings, train_each, zero
from support.toys import differences
from torch import Tensor
from torch.utils._pytree import tree_flatten

pytestmark = needs_deepspeed


def close(first: Any, second: Any, *, atol: float = 1e-6) -> None:
    """Compare nested states: tensors and floats within a tolerance."""
    ones, others = tree_flatten(first), tree_flatten(second)
    assert ones[1] == others[1]
    for one, other in zip(ones[0], others[0]):
        if isinstance(one, (Tensor, float)):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=atol)


@pytest.mark.timeout(300)
def test_every_stage_trains_as_torch_does(tmp_path: Path) -> None:
    changes: dict[str, Any] = {**UNSAVED, "ema": {"enabled": True, "decay": 0.9}}
    cases = [(settings(tmp_path / "ddp", "ddp", **changes), {})]
    cases += [
        (settings(tmp_path / str(stage), deepspeed=zero(stage), **changes), {})
        for stage in range(4)
    ]
    for ranks in run_processes(train_each, cases, world_size=2, timeout=240):
        reference = ranks[0]
        assert len(reference["trace"]) >= 5
        assert any(norm > 0.3 for *_, norm in reference["trace"]), "clipping was never at work"
        assert len({weight for _, weight, *_ in reference["trace"]}) > 1, "no ragged window"
        for found in ranks[1:]:
            close(reference["trace"], found["trace"])
            close(reference["results"], found["results"])
            for part in ("model", "ema", "optimizer", "scheduler"):
                close(reference["state"][part], found["state"][part])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bfloat16_and_offload(tmp_path: Path) -> None:
    offloaded = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    cases = [
        (settings(tmp_path / "ddp", "ddp", precision="bf16"), {}),
        (settings(tmp_path / "plain", "ddp"), {}),
    ]
    cases += [
        (settings(tmp_path / f"a{s}", precision="bf16", deepspeed=zero(s)), {}) for s in (0, 1, 3)
    ]
    weights = [{"bf16": {"enabled": True}, **zero(stage)} for stage in (1, 2, 3)]
    bare = {"norm": False}
    cases += [
        (settings(tmp_path / f"w{i}", deepspeed=section), bare) for i, section in enumerate(weights)
    ]
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
# By stage. make test stops stage 2 in tests/guarantees/test_every_stack.py.
@pytest.mark.parametrize(
    "stops", [{3: (4,)}, pytest.param({1: (1, 2, 4), 3: (1, 2, 4)}, marks=pytest.mark.slow)]
)
def test_stopped_and_resumed(stops: dict[int, tuple[int, ...]], tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
    changes = {"ema": {"enabled": True, "decay": 0.9}}
    for stage in stops:
        config = settings(tmp_path / f"whole{stage}", deepspeed=zero(stage), **changes)
        cases.append((config, {}))
        for stop in stops[stage]:
            parts = {**config, "workspace_root": str(tmp_path / f"{stage}-{stop}")}
            cases += [(parts, {"stop_at": stop}), ({**parts, "auto_resume": True}, {})]
    for ranks in run_processes(train_each, cases, world_size=2, timeout=280):
        found = iter(ranks)
        for stage in stops:
            whole = next(found)
            for _ in stops[stage]:
                first, second = next(found), next(found)
                assert first["trace"] + second["trace"] == whole["trace"]
                assert differences(second["state"], whole["state"]) == []
        assert next(found, None) is None
