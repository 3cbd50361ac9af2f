"""DistributedDataParallel with a parameter that some forwards leave out: the cause is named, and the mend gives one process's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_outcomes, run_processes
from support.toys import settings, whole_settings
from torch import Tensor, nn

import danling as dl
from danling.distributed import ReplicaDriftError


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.uses = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.last(hidden + self.between(hidden) if self.uses else hidden)


class SkippingRunner(dl.Runner):
    not_saved = ("seen",)

    def __init__(self, config: Mapping[str, Any], case: str, *, finds: bool) -> None:
        super().__init__(config)
        self.case, self.finds = case, finds
        self.model = Skipping().double()
        self.criterion = nn.MSELoss()
        points = torch.randn(64, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.datasets = {"train": [(point, point.sum(0, keepdim=True)) for point in points]}
        self.seen = list[tuple[Tensor, Tensor, bool]]()

    def ddp_kwargs(self) -> dict[str, Any]:
        # Each parameter is reduced by itself.
        buckets = {"bucket_cap_mb": 1e-5} if self.case == "rank" else {}
        return {**super().ddp_kwargs(), **buckets, "find_unused_parameters": self.finds}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        model: Any = self.unwrapped_model
        model.uses = self.case == "frozen" or (self.case == "last" and self.window.count == 1)
        model.uses |= self.case == "rank" and self.rank == 0
        if self.case == "frozen" and self.train_state.global_step == 1:
            model.between.requires_grad_(False)
        self.seen.append((*data, model.uses))
        return super().train_step(data)


def train(config: Mapping[str, Any], case: str, finds: bool) -> Any:
    with SkippingRunner(config, case, finds=finds) as runner:
        if not finds:
            with pytest.raises(ReplicaDriftError) as caught:
                runner.train()
            return str(caught.value)
        runner.train()
        return {
            name: value.clone() for name, value in runner.model_state_dict().items()
        }, runner.seen


@pytest.mark.parametrize("case", ["last", "never", "frozen"])
def test_unused_parameters_are_named_as_the_cause_and_the_mend_works(
    case: str, tmp_path: Path
) -> None:
    config = whole_settings(tmp_path, steps=3, log=False, scheduler={"type": "constant"}, ema={})
    for message in run_processes(train, config, case, False):
        assert (
            "none for some of them on rank" in message
            and "'find_unused_parameters': True" in message
        )
    check_mend(case, tmp_path / "mended")


def test_parameters_that_one_rank_leaves_out_are_named_before_the_ranks_meet_in_other_collectives(
    tmp_path: Path,
) -> None:
    """The other rank reduces what this one does not: its next collective met that, which ended the process in native code."""
    config = whole_settings(tmp_path, steps=3, log=False, scheduler={"type": "constant"}, ema={})
    first, last = sorted(run_outcomes(run_alone, config), key=lambda outcome: outcome.rank)
    assert isinstance(last.error, ReplicaDriftError), last.traceback
    assert "Received in update 1: none for some of them on rank 1" in str(last.error)
    assert first.exit_code == 1, (
        first
    )  # by the error that its connection was closed, and not by a signal
    check_mend("rank", tmp_path / "mended")


def run_alone(config: Mapping[str, Any]) -> None:
    with SkippingRunner(config, "rank", finds=False) as runner:
        runner.train()


def check_mend(case: str, directory: Path) -> None:
    """With what the error says, three updates are those of one process."""
    config = whole_settings(directory, steps=3, log=False, scheduler={"type": "constant"}, ema={})
    results = run_processes(train, config, case, True)
    model = Skipping().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for update in range(3):
        batches = [batch for _, seen in results for batch in seen[2 * update : 2 * update + 2]]
        model.between.requires_grad_(case != "frozen" or update == 0)
        for inputs, target, model.uses in batches:
            (nn.functional.mse_loss(model(inputs), target) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights, _ in results:
        assert all(
            (value - weights[name]).abs().max() < 1e-12
            for name, value in model.state_dict().items()
        )


class StaticGraph(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(3, 1), nn.MSELoss()
        self.datasets = {"train": [(torch.ones(3) * n, torch.ones(1)) for n in range(16)]}

    def ddp_kwargs(self) -> dict[str, Any]:
        return {**super().ddp_kwargs(), "static_graph": True}


def train_static(config: Mapping[str, Any]) -> str:
    with StaticGraph(config) as runner:
        try:
            runner.train()
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("stack", ["ddp", "accelerate"])
def test_a_static_graph_is_refused_for_several_micro_batches(stack: str, tmp_path: Path) -> None:
    """torch ends with an internal assertion."""
    if find_spec("accelerate") is None and stack == "accelerate":
        pytest.skip("accelerate is not installed.")
    for accum_steps in (1, 2):
        config = settings(
            tmp_path / str(accum_steps), steps=2, accum_steps=accum_steps, stack=stack
        )
        for message in run_processes(train_static, config, world_size=2):
            assert ("Received: static_graph=True from ddp_kwargs" in message) == (accum_steps == 2)
