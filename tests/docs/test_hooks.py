"""The table of hooks in the guide, held against a traced run on two processes."""

from __future__ import annotations

import re
from collections import Counter

import torch
from support.pages import ROOT
from support.processes import run_processes
from torch import nn
from torch.utils.data import TensorDataset

import danling as dl

GUIDE = ROOT / "docs" / "guides" / "subclassing.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d+) \| (all|main) \|", re.MULTILINE)


class Toy(dl.TorchRunner):
    """Eight micro-batches on each rank, in two epochs of two updates."""

    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        data = TensorDataset(torch.randn(16, 3), torch.randint(2, (16,)))
        self.datasets = {"train": data, "val": data}
        self.model = nn.Linear(3, 2)
        self.criterion = nn.CrossEntropyLoss()


def _counts(hooks: list[str]) -> Counter[str]:
    calls: Counter[str] = Counter()

    def counted(name: str) -> object:
        def hook(self: Toy, *args: object, **kwargs: object) -> object:
            calls[name] += 1
            return getattr(super(Counted, self), name)(*args, **kwargs)

        return hook

    class Counted(Toy):
        pass

    for name in hooks:
        setattr(Counted, name, counted(name))
    config = dl.RunnerConfig(epochs=2, accum_steps=2, seed=1, dataloader={"batch_size": 2})
    config.merge({"optim": {"type": "sgd", "lr": 0.1}, "scheduler": {"type": "cosine"}})
    with Counted(config) as runner:
        runner.train()
    return calls


def test_hooks_are_called_by_the_ranks_and_as_often_as_in_the_guide() -> None:
    rows = ROW.findall(GUIDE.read_text(encoding="utf-8"))
    assert len(rows) >= 20
    first, second = run_processes(_counts, [name for name, _, _ in rows])
    said = {name: (int(calls), int(calls) if ranks == "all" else 0) for name, calls, ranks in rows}
    assert {name: (first[name], second[name]) for name in said} == said
