"""A save refuses weights that are not finite: nothing is published and nothing pruned."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn

import danling as dl
from danling.training import NonFiniteError


class Rows(dl.Runner):
    """An embedding with rows that nobody reads: Adam divides 0 by 0 for them once its eps is 0, with a finite loss and gradient."""

    def __init__(
        self, config: dict[str, Any], spoils_at: int | None, terminates: bool = False
    ) -> None:
        super().__init__(config)
        self.spoils_at, self.terminates = spoils_at, terminates
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 3)).double()
        self.model.register_buffer("mask", torch.tensor(-torch.inf))
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        # The last rows, of which another rank has the shard.
        self.datasets = {
            "train": [(torch.tensor(index % 3), torch.tensor(index % 3)) for index in range(24)]
        }

    def optimizer_step(self) -> None:
        if self.state.train.global_step + 1 == self.spoils_at:
            for group in self.optimizer.param_groups:
                group["eps"] = 0.0
            if self.terminates and self.is_main_process:
                os.kill(os.getpid(), signal.SIGTERM)
        super().optimizer_step()


def train(
    config: dict[str, Any], spoils_at: int | None, terminates: bool = False
) -> dict[str, Tensor]:
    with Rows(config, spoils_at, terminates) as runner:
        if spoils_at is None:
            for group in runner.optimizer.param_groups:
                group["eps"] = 1e-8
        runner.train()
        with runner.whole_weights():
            return {
                name: value.detach().clone()
                for name, value in runner.unwrapped_model.named_parameters()
            }


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "ddp, 2 ranks, dcp": (2, {"checkpoint.backend": "dcp"}),
    "fsdp, 2 ranks": (2, {"stack": "parallel", "parallel.axes.shard": 2}),
}


def names_in(root: Path) -> set[str]:
    return {path.name for path in (root / "checkpoints").iterdir()}


@pytest.mark.parametrize(
    "layout", ["ddp", "fsdp, 2 ranks", pytest.param("ddp, 2 ranks, dcp", marks=pytest.mark.slow)]
)
def test_nonfinite_weights_are_not_saved_and_the_last_good_checkpoint_stays(
    tmp_path: Path, layout: str
) -> None:
    world_size, more = LAYOUTS[layout]
    config: dict[str, Any] = {
        "seed": 1,
        "log": False,
        "steps": 6,
        "dataloader": {"batch_size": 2, "shuffle": False},
    }
    config |= {
        "checkpoint.interval": 1,
        "checkpoint.keep_latest_k": 1,
        "evaluate_interval": 100,
        "auto_resume": True,
        **more,
    }
    undisturbed = run_processes(
        train, {**config, "dir": str(tmp_path / "whole")}, None, world_size=world_size
    )

    stopped = {**config, "dir": str(tmp_path / "run")}
    run_processes(train, {**stopped, "steps": 3}, None, world_size=world_size)
    before = names_in(tmp_path / "run")
    outcomes = run_outcomes(train, stopped, 4, world_size=world_size)
    for outcome in outcomes:
        assert isinstance(outcome.error, NonFiniteError), outcome
        assert "finite weights to save after step 4. Received: '0.weight'" in str(outcome.error)
    assert names_in(tmp_path / "run") == before

    ended = run_outcomes(
        train, {**stopped, "checkpoint.interval": 100}, 4, True, world_size=world_size
    )
    for outcome in ended:
        assert (
            isinstance(outcome.error, SystemExit) and outcome.error.code == 128 + signal.SIGTERM
        ), outcome
    assert names_in(tmp_path / "run") == before

    again = run_processes(train, stopped, None, world_size=world_size)
    for one, other in zip(undisturbed, again):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_frozen_parameter_is_named_once_and_buffers_are_not_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Masked(dl.TorchRunner):
        def __init__(self) -> None:
            config = {
                "dir": str(tmp_path),
                "log": False,
                "steps": 3,
                "optim": {"type": "sgd", "lr": 0.1},
            }
            super().__init__(config | {"checkpoint.interval": 1})
            self.model, self.criterion = nn.Linear(4, 3), nn.CrossEntropyLoss()
            self.model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
            self.model.huge = nn.Parameter(
                torch.full((4096,), 6e4, dtype=torch.float16), requires_grad=False
            )
            self.model.register_buffer("bias_mask", torch.full((2,), -torch.inf))
            self.datasets = {"train": [(torch.ones(4), torch.tensor(1))] * 4}

    with Masked() as runner, caplog.at_level("WARNING", logger="danling"):
        runner.train()
        assert runner.train_state.global_step == 3
    assert [message for message in caplog.messages if "not finite" in message] == [
        "The frozen parameter mask is not finite. It is saved as it is; values that are -inf by design belong in a buffer."
    ]
