"""G9: the figures of an evaluation are those of the whole set, for any batch size and number of processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import metrics as reference
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import danling as dl
from danling.metrics import Meters


def points(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(length, 5, generator=generator), torch.randint(
        0, 3, (length,), generator=generator
    )


class Evaluated(dl.TorchRunner):
    """Evaluates with a mean, a count, an object of torchmetrics and a figure that is no mean."""

    def __init__(self, config: dict[str, Any], length: int) -> None:
        super().__init__(config)
        from torchmetrics.classification import MulticlassF1Score

        self.datasets = {"val": TensorDataset(*points(length))}
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.criterion = nn.CrossEntropyLoss()
        self.metrics = {"acc": dl.metrics.accuracy, "f1": MulticlassF1Score(3, average="macro")}

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        result = super().summarize(split, totals)
        return {**result, "perplexity": math.exp(result["loss"])} if result else result


def evaluate(root: str, length: int, batch_size: int) -> dict[str, Any]:
    config = {
        "seed": 1,
        "workspace_root": root,
        "log": False,
        "dataloader": {"batch_size": batch_size},
    }
    with Evaluated(config, length) as runner:
        before = torch.get_rng_state()
        result = runner.evaluate("val")["val"]
        assert torch.equal(before, torch.get_rng_state())
        predictions = torch.stack(runner.infer("val"))
        again = runner.evaluate("val")["val"]
        return {"result": result, "again": again, "pred": predictions}


def evaluate_nothing(root: str) -> dict[str, float]:
    with Evaluated({"seed": 1, "workspace_root": root, "log": False}, 4) as runner:
        runner.dataloaders["val"] = []
        runner.sources.clear()
        result: dict[str, float] = runner.evaluate_epoch("val")
        return result


def evaluate_each(root: str) -> list[Any]:
    return [*(evaluate(root, *sizes) for sizes in SIZES), evaluate_nothing(root)]


SIZES = [(23, 4), (7, 3), (2, 4)]
"""Samples, and samples of a batch: none divides over the ranks, and of the last ones some ranks have none."""


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_figures_are_those_of_the_whole_set(world_size: int, tmp_path: Path) -> None:
    *found, empty = zip(*run_processes(evaluate_each, str(tmp_path), world_size=world_size))
    assert empty == ({},) * world_size
    for (length, _), ranks in zip(SIZES, found, strict=True):
        _, y = points(length)
        pred = ranks[0]["pred"]
        assert len(pred) == length
        loss, labels = nn.functional.cross_entropy(pred.double(), y).item(), pred.argmax(1)
        f1 = reference.f1_score(y, labels, average="macro", zero_division=0)
        for rank in ranks:
            assert rank["result"] == rank["again"] == ranks[0]["result"]
            assert torch.equal(rank["pred"], pred)
            assert rank["result"]["loss"] == pytest.approx(loss, rel=1e-6)
            assert rank["result"]["acc"] == pytest.approx(
                reference.accuracy_score(y, labels), rel=1e-12
            )
            assert rank["result"]["f1"] == pytest.approx(f1, rel=1e-6)
            assert rank["result"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
