"""Layers that are new in a model, and that only some stages of a pipeline have, are left out of the load of an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

INPUTS = torch.linspace(-1.0, 1.0, 64).reshape(16, 4)


class Body(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)),
            nn.MSELoss(),
        )
        self.datasets = {"train": TensorDataset(INPUTS, INPUTS[:, :2].sin())}


class Deeper(Body):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model.append(nn.Linear(2, 2))


def load(
    trained: Mapping[str, Any], deeper: Mapping[str, Any], source: str
) -> tuple[list[str], int]:
    """Train the body, and load it into the deeper model; return names of weights that are not those of the body, and the step."""
    with Body(trained) as runner:
        runner.train()
        stored = {name: value.clone() for name, value in runner.model_state_dict().items()}
    with Deeper({**deeper, source: str(Path(trained["dir"]) / "checkpoints")}) as runner:
        found = runner.model_state_dict()
        others = [
            name
            for name, value in found.items()
            if name not in stored or not torch.equal(value, stored[name])
        ]
        return others, runner.train_state.global_step


@pytest.mark.parametrize(("source", "step"), [("pretrained", 0), ("resume", 2)])
def test_layer_of_one_stage_that_a_checkpoint_lacks(source: str, step: int, tmp_path: Path) -> None:
    excluded = ["model.3", "optimizer"] if source == "resume" else ["model.3"]
    trained, deeper = (
        settings(
            tmp_path / name,
            steps=steps,
            stack="parallel",
            parallel={"axes": {"pipeline": 2}, "module_fqns_per_model_part": [["0", "1"], last]},
            checkpoint={"exclude_from_loading": left_out},
        )
        for name, steps, last, left_out in (
            ("body", 2, ["2"], []),
            ("deeper", 4, ["2", "3"], excluded),
        )
    )
    of_first, of_last = run_processes(load, trained, deeper, source, world_size=2, timeout=60)
    assert of_first == ([], step) and of_last == (["3.weight", "3.bias"], step)
