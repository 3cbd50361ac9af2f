"""The stack of `docs/guides/new_stack.md` on a model whose ranks do not all use all parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.pages import ROOT, blocks_of
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Branched(nn.Module):
    """Has a layer that nothing uses, and one that one rank uses."""

    def __init__(self, uses_extra: bool) -> None:
        super().__init__()
        self.uses_extra = uses_extra
        self.first, self.extra, self.idle = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        return self.extra(hidden) if self.uses_extra else hidden


def changed(root: Path) -> tuple[set[str], dict[str, Tensor]]:
    """Train, and return which weights have changed, and all of them."""
    program: dict[str, Any] = {"__name__": "flat"}
    page = ROOT / "docs/guides/new_stack.md"
    exec(next(block.code for block in blocks_of(page) if block.title == "flat.py"), program)

    class Toy(program["FlatReduceRunner"]):  # type: ignore[misc]
        def __init__(self, config: dict[str, Any]) -> None:
            super().__init__(config)
            self.model, self.criterion = Branched(self.rank == 1), nn.MSELoss()
            self.datasets = {"train": TensorDataset(torch.randn(8, 3), torch.randn(8, 3))}

    optim = {"type": "adamw", "lr": 0.1, "weight_decay": 0.1}
    with Toy(
        {"steps": 2, "seed": 1, "dir": str(root), "dataloader": {"batch_size": 2}, "optim": optim}
    ) as runner:
        before = {name: value.clone() for name, value in runner.model.state_dict().items()}
        runner.train()
        after = runner.model.state_dict()
        return {name for name in before if not before[name].equal(after[name])}, after


def test_parameter_unused_on_all_ranks_stays_and_one_used_on_a_rank_is_trained_on_all(
    tmp_path: Path,
) -> None:
    (names, weights), (_, others) = run_processes(changed, tmp_path, world_size=2, timeout=60)
    assert names == {"first.weight", "first.bias", "extra.weight", "extra.bias"}
    assert all(weights[name].equal(others[name]) for name in weights)
