"""What one micro-batch hands to the next: reset where a pass begins, detached after each backward, saved and restored for each rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.checkpoints.errors import CheckpointMismatch
from danling.training.recompute import map_carry

LANES, CHUNKS, LENGTH, TOKENS = 4, 6, 3, 7


def columns() -> TensorDataset:
    """Return chunks of `LANES` texts, such that each batch of `LANES` samples goes on where the one before it ended."""
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(TOKENS, (LANES, CHUNKS * LENGTH + 1), generator=generator)
    starts = range(0, CHUNKS * LENGTH, LENGTH)
    inputs = torch.stack(
        [texts[lane, start : start + LENGTH] for start in starts for lane in range(LANES)]
    )
    targets = torch.stack(
        [texts[lane, start + 1 : start + 1 + LENGTH] for start in starts for lane in range(LANES)]
    )
    return TensorDataset(inputs, targets)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = (
            nn.Embedding(TOKENS, 8),
            nn.LSTM(8, 8, batch_first=True),
            nn.Linear(8, TOKENS),
        )

    def forward(self, inputs: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        hidden, state = self.cell(self.embedding(inputs), state)
        return self.head(hidden).transpose(1, 2), state


class Language(dl.Runner):
    """Truncated backpropagation through time; kills itself within a chosen update."""

    not_saved = ("begun", "losses")

    def __init__(self, config: dict[str, Any], killed_in: int | None = None) -> None:
        super().__init__(config)
        self.killed_in = killed_in
        self.losses: list[float] = []
        self.begun: list[tuple[str, int]] = []
        self.model, self.criterion = Network(), nn.CrossEntropyLoss()
        self.datasets = {"train": columns(), "val": columns()}

    def on_pass_start(self, split: str) -> None:
        self.begun.append((split, self.state.train.global_step))
        state = torch.randn(1, len(self.datasets[split]) // CHUNKS // self.data_domain.size, 8)
        self.carry = {"state": (state, torch.zeros_like(state)), "chunks": 0}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        inputs, target = data
        if self.state.train.global_step + 1 == self.killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        assert not any(tensor.requires_grad for tensor in self.carry["state"])
        pred, state = self.model(inputs, self.carry["state"])
        loss = self.criterion(pred, target)
        self.carry = {"state": state, "chunks": self.carry["chunks"] + 1}
        self.backward(loss)
        self.losses.append(loss.item())
        return pred, loss

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor]:
        pred, self.carry = self.model(data[0], self.carry)
        return pred, self.criterion(pred, data[1])


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    base = {
        "seed": 1,
        "steps": 14,
        "dir": str(root),
        "log": False,
        "checkpoint.interval": 1,
        "evaluate_interval": 4,
    }
    data = {"batch_size": LANES, "shuffle": False}
    return {
        **base,
        "auto_resume": True,
        "dataloader": data,
        "optim": {"type": "adamw", "lr": 0.05},
        **changes,
    }


def train(
    config: dict[str, Any], killed_in: int | None = None
) -> tuple[dict[str, Tensor], list[float], list[Any], Any]:
    with Language(config, killed_in) as runner:
        runner.train()
        weights = {
            name: p.detach().clone() for name, p in runner.unwrapped_model.named_parameters()
        }
        return weights, runner.losses, runner.begun, runner.carry


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def by_hand(config: dict[str, Any]) -> list[float]:
    """Return the losses of the plain loop, from the weights and the first states of the runner."""
    config = {**config, "auto_resume": False}
    with Language({**config, "steps": 1, "dir": f"{config['dir']}-states"}) as runner:
        model, losses, batches = (
            runner.model,
            [],
            list(torch.utils.data.DataLoader(columns(), LANES)),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        starts: list[Any] = []
        with Language({**config, "dir": f"{config['dir']}-whole"}) as other:
            begin = other.on_pass_start

            def noting(split: str) -> None:
                begin(split)
                starts.append(map_carry(other.carry["state"], Tensor.clone))

            other.on_pass_start = noting  # type: ignore[method-assign]
            other.train()
    for index in range(14):
        inputs, target = batches[index % CHUNKS]
        if index % CHUNKS == 0:
            state = starts[index // CHUNKS]
        pred, state = model(inputs, state)
        loss = nn.functional.cross_entropy(pred, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = tuple(tensor.detach() for tensor in state)
        losses.append(loss.item())
    return losses


def test_the_losses_are_those_of_the_loop_by_hand(tmp_path: Path) -> None:
    expected = run_processes(by_hand, settings(tmp_path / "hand"), world_size=1)[0]
    _, losses, begun, carry = run_processes(train, settings(tmp_path / "run"), world_size=1)[0]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert begun == [("train", 0), ("train", 6), ("train", 12)]
    assert (
        carry["chunks"] == 2
        and type(carry["state"]) is tuple
        and not carry["state"][0].requires_grad
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("world_size", "updates"),
    [
        # The first update after a save, the first one of a pass, and the last one.
        pytest.param(1, (2, 7, 14), id="1"),
        pytest.param(2, (7,), id="2"),
        pytest.param(1, tuple(range(2, 15)), id="1 in every update", marks=pytest.mark.slow),
        pytest.param(
            2, tuple(range(2, 15, 2)), id="2 in every other update", marks=pytest.mark.slow
        ),
    ],
)
def test_killed_run_ends_as_uninterrupted_one(
    world_size: int, updates: tuple[int, ...], tmp_path: Path
) -> None:
    changes = {"dataloader.batch_size": LANES // world_size, "checkpoint.async_enabled": False}
    whole = run_processes(train, settings(tmp_path / "whole", **changes), world_size=world_size)
    for killed_in in updates:
        config = settings(tmp_path / str(killed_in), **changes)
        killed = run_outcomes(train, config, killed_in, world_size=world_size)
        assert -signal.SIGKILL in [outcome.exit_code for outcome in killed]
        ended = run_processes(train, config, world_size=world_size)
        for mine, other in zip(ended, whole):
            assert same(mine[0], other[0]) and mine[1] == other[1][-len(mine[1]) :]
            assert mine[2] == [call for call in other[2] if call[1] >= 14 - len(mine[1])]


def stop_at(config: dict[str, Any], step: int) -> None:
    with Language({**config, "steps": step}) as runner:
        runner.train()


def test_another_number_of_ranks_is_refused_within_a_pass_and_taken_at_its_end(
    tmp_path: Path,
) -> None:
    two, one = {"dataloader.batch_size": LANES // 2}, {"dataloader.batch_size": LANES}
    run_processes(stop_at, settings(tmp_path / "within", **two), 8, world_size=2)
    with pytest.raises(
        CheckpointMismatch,
        match=r"2 ranks, .* its own self.carry in the middle of this pass. Received: 1",
    ):
        run_processes(train, settings(tmp_path / "within", **one), world_size=1)
    run_processes(stop_at, settings(tmp_path / "end", **two), 6, world_size=2)
    _, losses, begun, _ = run_processes(train, settings(tmp_path / "end", **one), world_size=1)[0]
    assert len(losses) == 8 and begun == [("train", 6), ("train", 12)]


def test_a_carry_of_something_else_is_refused(tmp_path: Path) -> None:
    class Wrong(Language):
        def train_step(self, data: Any) -> tuple[Any, Tensor]:
            returned = super().train_step(data)
            self.carry["model"] = [self.model]
            return returned

    with (
        Wrong(settings(tmp_path)) as runner,
        pytest.raises(TypeError, match=r"self.carry\['model'\]\[0\] of type Network"),
    ):
        runner.train()
