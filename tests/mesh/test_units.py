"""Units of FSDP2 whose use depends on rank, micro-batch or update: the weights of a loop by hand, or an error that names the modules."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.patience import patience
from support.processes import ProcessFailure, run_outcomes, run_processes
from support.toys import whole_settings
from torch import Tensor, nn

import danling as dl
from danling.mesh.units import UnitOrderError
from danling.utils.tensors import whole

Used = tuple[int, ...]
"""Which blocks a forward runs."""
Plan = Sequence[Sequence[Sequence[Used]]]
"""By update, micro-batch and rank, which blocks are run."""


class Bank(nn.Module):
    """Several layers, of which a forward uses some; one unit of FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abc"})

    def forward(self, hidden: Tensor, used: Used) -> Tensor:
        for number, expert in enumerate(self.experts.values()):
            if number in used:
                hidden = hidden + torch.tanh(expert(hidden))
        return hidden


class Chosen(nn.Module):
    """Blocks of equal shape, of which a forward uses some: three units of FSDP2, or one with all of them."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList([Bank()] if together else [nn.Linear(6, 6) for _ in range(3)])
        self.together = together
        self.used: Used = ()

    def forward(self, inputs: Tensor) -> Tensor:
        used = self.used
        hidden = torch.tanh(self.first(inputs))
        if self.together:
            hidden = self.blocks[0](hidden, used)
        else:
            for number in used:
                hidden = hidden + torch.tanh(self.blocks[number](hidden))
        return self.last(hidden)


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(count, 2, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class ChosenRunner(dl.Runner):
    not_saved = ("seen",)

    def __init__(
        self, config: Mapping[str, Any], plan: Plan, *, together: bool = False, killed_at: int = -1
    ) -> None:
        super().__init__(config)
        self.killed_at = killed_at
        self.model = Chosen(together=together).double()
        self.criterion = nn.MSELoss()
        self.datasets = {"train": Points(96)}
        self.plan, self.seen = plan, list[tuple[Tensor, Tensor, Used]]()

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        self.model.used = self.plan[self.train_state.attempted][self.window.count - 1][self.rank]
        self.seen.append((*data, self.model.used))
        if self.rank == 1 and self.train_state.attempted == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(data)

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        self.model.used = self.plan[-1][-1][self.rank]
        return super().evaluate_step(data)


def train(
    config: Mapping[str, Any], plan: Plan, together: bool, killed_at: int = -1
) -> tuple[dict[str, Tensor], Any]:
    """Train and return the weights, and what this rank's micro-batches were made of."""
    with ChosenRunner(config, plan, together=together, killed_at=killed_at) as runner:
        runner.train()
        return {
            name: whole(value).clone() for name, value in runner.model_state_dict().items()
        }, runner.seen


def by_hand(
    plan: Plan, seen: Sequence[Sequence[tuple[Tensor, Tensor, Used]]], *, together: bool
) -> dict[str, Tensor]:
    """The same updates on one process, in a loop without the library."""
    model = Chosen(together=together).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    first = 0
    for micro_batches in plan:
        batches = [batch for rank in seen for batch in rank[first : first + len(micro_batches)]]
        first += len(micro_batches)
        for inputs, target, model.used in batches:
            (nn.functional.mse_loss(model(inputs), target) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def settings(root: Path, axes: Mapping[str, int], plan: Plan, **changes: Any) -> dict[str, Any]:
    recomputes = changes.pop("activation_checkpointing", False)
    parallel = {"axes": dict(axes), "activation_checkpointing": recomputes}
    base: dict[str, Any] = {
        "stack": "parallel",
        "parallel": parallel,
        "steps": len(plan),
        "accum_steps": len(plan[0]),
    }
    loader: dict[str, Any] = {"batch_size": 2}
    if "gradient_sum" in changes:
        loader = {"global_batch_size": 2 * len(plan[0]) * ranks_of(axes), "micro_batch_size": 2}
        del base["accum_steps"]
    base |= {
        "dataloader": loader,
        "optim": {"type": "adamw", "lr": 0.05},
        "log": False,
        "scheduler": {"type": "constant"},
    }
    return whole_settings(str(root), **{**base, "checkpoint": {"load_only": True}, **changes})


FSDP, HSDP = {"shard": 2}, {"replicate": 2, "shard": 2}


def alike(ranks: int, *updates: Sequence[Used]) -> Plan:
    """A plan that is the same on all ranks; `updates` have the blocks of each micro-batch."""
    return [[[used] * ranks for used in update] for update in updates]


def ranks_of(axes: Mapping[str, int]) -> int:
    return math.prod(axes.values())


def gap(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert weights.keys() == expected.keys()
    return max((value - expected[name]).abs().max().item() for name, value in weights.items())


EVEN_OR_UNEVEN: Plan = [[[(0,), (0, 1)], [(2,), (1,)]], [[(0,), (0,)], [(1,), (0,)]]]
"""Ranks use other parts of one block; the third part gets no gradient in the second update."""

RIGHT: dict[str, tuple[Mapping[str, int], Plan, bool, dict[str, Any]]] = {
    "HSDP, blocks that the last micro-batch does not use": (
        HSDP,
        alike(4, [(0, 1, 2), (0, 2)], [(0, 1), (1,)], [(0,), (0,)]),
        False,
        {},
    ),
    "HSDP, parts of a block that change": (
        HSDP,
        alike(4, [(0,), (1,)], [(0, 1), (2,)], [(1,), (1,)]),
        True,
        {},
    ),
    "FSDP, a block that is used twice": (
        FSDP,
        alike(2, [(0, 0), (1,)], [(2, 1), (2, 1)]),
        False,
        {},
    ),
    "FSDP, parts of a block by rank": (FSDP, EVEN_OR_UNEVEN, True, {}),
    "FSDP, parts of a block by rank, reduced last": (
        FSDP,
        EVEN_OR_UNEVEN,
        True,
        {"fsdp": {"gradient_sync": "last"}},
    ),
    "HSDP, parts of a block by rank": (
        HSDP,
        [
            [[(0,), (1,), (2,), (0, 1)], [(2,), (1,), (1,), (1,)]],
            [[(0,), (0,), (0,), (1,)], [(0,), (0,), (1,), (1,)]],
        ],
        True,
        {},
    ),
    "FSDP, recomputed": (FSDP, EVEN_OR_UNEVEN, True, {"activation_checkpointing": True}),
    "FSDP, canonical": (FSDP, EVEN_OR_UNEVEN, True, {"gradient_sum": "canonical"}),
}


SLOW = {"HSDP, parts of a block that change"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RIGHT],
)
def test_units_used_by_some_ranks_or_micro_batches_equal_a_loop_by_hand(
    name: str, tmp_path: Path
) -> None:
    axes, plan, together, changes = RIGHT[name]
    results = run_processes(
        train, settings(tmp_path, axes, plan, **changes), plan, together, world_size=ranks_of(axes)
    )
    expected = by_hand(plan, [seen for _, seen in results], together=together)
    for weights, _ in results:
        assert gap(weights, expected) < 1e-12


@pytest.mark.slow
def test_killed_run_of_hsdp_with_a_block_unused_in_the_last_micro_batch_equals_a_loop(
    tmp_path: Path,
) -> None:
    axes, plan, together, _ = RIGHT["HSDP, blocks that the last micro-batch does not use"]
    whole_run = settings(tmp_path / "whole", axes, plan)
    seen = [each for _, each in run_processes(train, whole_run, plan, together, world_size=4)]
    killed = settings(
        tmp_path / "killed", axes, plan, checkpoint={"interval": 1, "async_mode": "disabled"}
    )
    killed |= {"auto_resume": True, "dir": str(tmp_path / "run")}
    outcomes = run_outcomes(train, killed, plan, together, 2, world_size=4)
    assert any(isinstance(outcome.error, ProcessFailure) for outcome in outcomes)
    expected = by_hand(plan, seen, together=together)
    for weights, resumed in run_processes(train, killed, plan, together, world_size=4):
        assert len(resumed) == len(plan[0]), "one update was left"
        assert gap(weights, expected) < 1e-12


def refused(config: Mapping[str, Any], plan: Plan) -> tuple[str, int]:
    """Train until ranks run different modules; return the message and the number of updates."""
    with ChosenRunner(config, plan) as runner:
        with pytest.raises(UnitOrderError) as caught:
            runner.train()
        return str(caught.value), runner.state.train.global_step


@pytest.mark.parametrize(
    ("axes", "odd"),
    [(FSDP, [(0,), (1,)]), (HSDP, [(0,), (0,), (1,), (1,)])],
    ids=["by shard", "by replica"],
)
def test_ranks_with_different_blocks_end_before_the_update(
    axes: Any, odd: list[Used], tmp_path: Path
) -> None:
    number = ranks_of(axes)
    plan: Plan = [[[(0, 1)] * number] * 2, [[(2,)] * number, odd]]
    for message, step in run_processes(
        refused, settings(tmp_path, axes, plan), plan, world_size=number
    ):
        assert step == 1 and "fsdp.blocks" in message
        halves = [list(range(number // 2)), list(range(number // 2, number))]
        assert (
            f"the weights of blocks.0 on ranks {halves[0]}; the weights of blocks.1 on ranks {halves[1]}"
            in message
        )


class Evaluated(ChosenRunner):
    def __init__(self, config: Mapping[str, Any], plan: Plan) -> None:
        super().__init__(config, plan)
        self.datasets["val"] = Points(4)


def evaluate(config: Mapping[str, Any], plan: Plan) -> str:
    with Evaluated(config, plan) as runner, pytest.raises(UnitOrderError) as caught:
        runner.evaluate()
    return str(caught.value)


def test_ranks_with_different_blocks_in_evaluation_are_named(tmp_path: Path) -> None:
    plan: Plan = [[[(0,), (1,)]]]
    for message in run_processes(evaluate, settings(tmp_path, FSDP, plan), plan):
        assert (
            "the weights of blocks.0 on ranks [0]; the weights of blocks.1 on ranks [1]" in message
        )


def test_rank_with_more_blocks_is_named_by_the_report_of_a_hang(tmp_path: Path) -> None:
    plan: Plan = [[[(0,), (0,)]]] * 2 + [[[(0,), (0, 1, 2)]]]
    comm = {"train_timeout_seconds": float(round(patience(8.0))), "hang_warning_seconds": None}
    config = settings(tmp_path, FSDP, plan, comm=comm, log=True, dir=str(tmp_path / "run"))
    outcomes = run_outcomes(train, config, plan, False, timeout=100)
    assert all(outcome.error is not None for outcome in outcomes)
    (log,) = (tmp_path / "run" / "logs").glob("*.log")
    lines = log.read_text().splitlines()
    waiting = [line for line in lines if " waits in " in line]
    assert len(waiting) == 2 and any(" of the module blocks." in line for line in waiting)
    assert any(
        line.startswith("Not all ranks run the same modules in the same order") for line in lines
    )
