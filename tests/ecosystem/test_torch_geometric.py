"""torch_geometric: graphs are put together, counted and predicted one by one, and an update is that of one large batch.

Library: torch_geometric
Works: `Data` in a list or a dataset, several in a sample, and its own `DataLoader`; models that take a `Batch` or its tensors
Exact: updates, metrics and predictions of graphs and nodes at any batch size; resume
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toys import KeepsGradients
from torch import Tensor, nn

import danling as dl

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

NUMBER = 11
"""Graphs, of 2 to 5 nodes: no batch size divides it."""


def graphs(level: str = "graph") -> list[Any]:
    made = []
    generator = torch.Generator().manual_seed(1)
    for index in range(NUMBER):
        nodes = 2 + index % 4
        x = torch.randn(nodes, 3, generator=generator, dtype=torch.float64)
        ring = torch.stack([torch.arange(nodes), torch.arange(1, nodes + 1) % nodes])
        entries = 1 if level == "graph" else nodes
        y = torch.randint(0, 2, (entries,), generator=generator)
        made.append(Data(x=x, edge_index=torch.cat([ring, ring.flip(0)], 1), y=y))
    return made


class Graphs(nn.Module):
    """Classifies graphs, or nodes; `batch` is a whole batch."""

    def __init__(self, level: str) -> None:
        super().__init__()
        self.level = level
        self.conv, self.head = GCNConv(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, batch: Any) -> Tensor:
        hidden = self.conv(batch.x, batch.edge_index).relu()
        return self.head(global_mean_pool(hidden, batch.batch) if self.level == "graph" else hidden)


class Layers(Graphs):
    """The same model, with the arguments of a layer."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = self.conv(x, edge_index).relu()
        return self.head(global_mean_pool(hidden, batch) if self.level == "graph" else hidden)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).double().mean()


class Classifying(KeepsGradients):
    not_saved = ("seen",)

    def __init__(
        self, config: dict[str, Any], level: str, model: type[Graphs] = Graphs, own: bool = False
    ) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.model, self.criterion = model(level), nn.CrossEntropyLoss()
        self.metrics = {"acc": hits}
        self.datasets = {"val": graphs(level)}
        if own:
            self.dataloaders = {"train": DataLoader(graphs(level), batch_size=3, shuffle=True)}
        else:
            self.datasets["train"] = graphs(level)
        self.seen: list[Tensor] = []

    def train_step(self, data: Any) -> Any:
        self.seen.append(data.x.clone())
        return super().train_step(data)


def settings(root: Path, micro_batch: int, accum_steps: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "steps": 1,
        "seed": 0,
        "dir": str(root / "run"),
        "log": False,
        "accum_steps": accum_steps,
    }
    config |= {"optim": {"type": "sgd", "lr": 0.1}}
    return {
        **config,
        "dataloader": {"batch_size": micro_batch, "shuffle": False, "drop_last": False},
        **more,
    }


@pytest.mark.parametrize("model", [Graphs, Layers])
@pytest.mark.parametrize("level", ["graph", "node"])
def test_update_of_micro_batches_equals_one_of_a_large_batch(
    level: str, model: type[Graphs], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    alone, whole = Graphs(level), Batch.from_data_list(graphs(level))
    logits = alone(whole)
    expected = nn.CrossEntropyLoss()(logits, whole.y)
    expected.backward()
    with Classifying(settings(tmp_path, 3, 4), level, model) as runner:
        before = runner.evaluate("val")["val"]
        predicted = runner.infer("val")
        runner.train()
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(
                runner.gradients[name], parameter.grad, rtol=1e-12, atol=1e-14
            )
        assert runner.train_state.samples == NUMBER
    assert before["loss"] == pytest.approx(expected.item(), rel=1e-12)
    if level == "graph":
        assert before["acc"] == pytest.approx(float(hits(logits, whole.y)))
    parts = (
        logits.detach()
        if level == "graph"
        else logits.detach().split([g.num_nodes for g in graphs()])
    )
    assert len(predicted) == NUMBER
    for mine, theirs in zip(predicted, parts, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_graphs_are_those_of_the_uninterrupted_run(workers: int, own: bool, tmp_path: Path) -> None:
    def seen(root: Path, steps: int) -> list[Tensor]:
        loader = {"batch_size": 3, "num_workers": workers}
        with Classifying(
            settings(root, 3, 1, steps=steps, auto_resume=True, dataloader=loader), "graph", own=own
        ) as r:
            r.train()
            return r.seen

    whole = seen(tmp_path / "whole", 7)
    parts = [*seen(tmp_path / "parts", 2), *seen(tmp_path / "parts", 7)]
    assert len(whole) == len(parts) == 7 and all(map(torch.equal, whole, parts))


class Pairs(dl.Runner):
    """Each sample is two graphs and a number, as where molecules are matched."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = Matching(), nn.MSELoss()
        one = graphs()
        self.datasets = {
            "train": [{"input": {"a": a, "b": b}, "target": 0.5} for a, b in pairwise(one)]
        }


class Matching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(3, 4).double()

    def forward(self, a: Any, b: Any) -> Tensor:
        one, other = (global_mean_pool(self.conv(g.x, g.edge_index), g.batch) for g in (a, b))
        return (one * other).sum(-1)


def test_samples_may_hold_several_graphs(tmp_path: Path) -> None:
    with Pairs(settings(tmp_path, 4, 3)) as runner:
        runner.train()
        assert runner.train_state.samples == NUMBER - 1


def test_batch_of_neighbours_counts_its_seed_nodes() -> None:
    drawn = Data(
        x=torch.ones(9, 3),
        edge_index=torch.zeros(2, 4, dtype=torch.int64),
        y=torch.zeros(9),
        batch_size=4,
    )
    assert dl.training.count_samples(drawn) == 4
    assert (
        dl.training.peek_target(drawn) is None
    )  # the targets of all 9 nodes are not those of the loss
