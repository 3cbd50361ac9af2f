"""G1 and G6 on a mesh: a run that is stopped goes on bitwise on its layout, and on any other as one process would have.

The model has dropout where the layout is kept, averaged weights, and a schedule; every update accumulates two micro-batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.layouts import LayoutRunner
from support.processes import run_processes
from support.toys import whole_settings
from torch import Tensor

from danling.utils.tensors import canonical_name, whole

LAYOUTS: dict[str, tuple[int, dict[str, int] | None]] = {
    "one": (1, None),
    "DDP 2": (2, None),
    "FSDP 2": (2, {"shard": 2}),
    "FSDP 3": (3, {"shard": 3}),
    "FSDP 4": (4, {"shard": 4}),
    "HSDP": (4, {"replicate": 2, "shard": 2}),
    "TP 2": (2, {"tensor": 2}),
    "TP x FSDP": (4, {"tensor": 2, "shard": 2}),
    "PP 2": (2, {"pipeline": 2}),
    "PP V": (2, {"pipeline": 2}),
    "PP x FSDP": (4, {"pipeline": 2, "shard": 2}),
    "EP": (2, {"expert": 2}),
    "CP": (2, {"context": 2}),
}


def train(config: dict[str, Any], model: dict[str, Any], stop_at: int | None) -> dict[str, Tensor]:
    with LayoutRunner(config, model=model) as runner:
        runner.stop_at = stop_at
        runner.train()
        found = {
            f"model.{canonical_name(name)}": value
            for name, value in runner.model_state_dict().items()
        }
        found |= {f"ema.{name}": value for name, value in runner.ema.weights.items()}
        for name, entry in runner.optimizer_state_dict()["state"].items():
            found |= {f"optimizer.{name}.{key}": value for key, value in entry.items()}
        return {name: whole(value).clone() for name, value in found.items()}


def run(
    root: Path, layout: str, model: dict[str, Any], *, stop_at: int | None = None, resume: str = ""
) -> Any:
    world, axes = LAYOUTS[layout]
    replicas = world if axes is None else axes.get("shard", 1) * axes.get("replicate", 1)
    base = {
        "seed": 5,
        "steps": 5,
        "accum_steps": 4 if replicas == 3 else 2,
        "max_grad_norm": 0.05,
        "log": False,
    }
    base |= {
        "evaluate_interval": 5,
        "try_evaluation": False,
        "checkpoint": {"interval": 100, "backend": "dcp"},
    }
    loader = {"batch_size": {1: 12, 2: 6, 3: 2, 4: 3}[replicas]}
    config = whole_settings(
        "unused", **base, dir=str(root), dataloader=loader, resume=resume or None
    )
    if axes is not None:
        schedule = "ZBVZeroBubble" if layout == "PP V" else "1F1B"
        config |= {"stack": "parallel", "parallel": {"axes": axes, "pipeline_schedule": schedule}}
    ranks = run_processes(train, config, model, stop_at, world_size=world, timeout=100)
    return {name: value for rank in ranks for name, value in rank.items()}, str(
        root / "checkpoints/latest"
    )


def model_for(*layouts: str, dropout: float = 0.0) -> dict[str, Any]:
    return {
        "depth": 4 if "PP V" in layouts else 2,
        "dropout": dropout,
        "experts": 4 if "EP" in layouts else 0,
    }


def gap(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((value - theirs[name]).abs().max().item() for name, value in mine.items())


# The one whose stages lie out of order; experts come and go in a route below.
@pytest.mark.parametrize(
    "layout",
    [
        "PP V",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("EP", "FSDP 2", "TP x FSDP", "PP 2")
        ),
    ],
)
def test_resumes_bitwise_at_its_stop(layout: str, tmp_path: Path) -> None:
    model = model_for(layout, dropout=0.2)
    uninterrupted, _ = run(tmp_path / "whole", layout, model)
    _, first = run(tmp_path / "first", layout, model, stop_at=3)
    ended, _ = run(tmp_path / "second", layout, model, resume=first)
    assert gap(ended, uninterrupted) == 0.0


@pytest.mark.parametrize(
    "route",
    [
        pytest.param(["FSDP 4", "FSDP 2", "one", "FSDP 4"], marks=pytest.mark.slow),
        pytest.param(["FSDP 3", "HSDP", "FSDP 3"], marks=pytest.mark.slow),
        ["DDP 2", "TP x FSDP"],
        pytest.param(["DDP 2", "TP x FSDP", "PP x FSDP", "DDP 2"], marks=pytest.mark.slow),
        ["TP 2", "PP V", "CP", "one"],
        pytest.param(["EP", "FSDP 2", "EP"], marks=pytest.mark.slow),
    ],
    ids=" - ".join,
)
def test_goes_on_at_another_layout(route: list[str], tmp_path: Path) -> None:
    model = model_for(*route)
    uninterrupted, _ = run(tmp_path / "one", "one", model)
    source = ""
    for place, layout in enumerate(route):
        stop_at = None if place == len(route) - 1 else place + 1
        ended, source = run(tmp_path / str(place), layout, model, stop_at=stop_at, resume=source)
    assert gap(ended, uninterrupted) < 1e-9


@pytest.mark.slow
def test_dropout_under_fsdp_equals_ddp(tmp_path: Path) -> None:
    """The streams belong to data replicas, so a run goes on from one stack to the other as if it were the same."""
    model = model_for(dropout=0.2)
    uninterrupted, _ = run(tmp_path / "whole", "DDP 2", model)
    _, source = run(tmp_path / "first", "DDP 2", model, stop_at=3)
    ended, _ = run(tmp_path / "second", "FSDP 2", model, resume=source)
    assert gap(ended, uninterrupted) < 1e-9
