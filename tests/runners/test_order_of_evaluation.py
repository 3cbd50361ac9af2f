"""Settings of training's order do not reach evaluation and inference: these read every sample once, in the order of the dataset."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import danling as dl

SIZE = 21


def numbered(length: int) -> TensorDataset:
    inputs = torch.arange(float(length)).unsqueeze(1)
    return TensorDataset(inputs, 2 * inputs)


class Numbers(dl.Runner):
    """Predicts the number of a sample, so that predictions say which samples were read, and in which order."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Linear(1, 1), nn.MSELoss()
        with torch.no_grad():
            self.model.weight.fill_(1.0)
            self.model.bias.zero_()
        self.datasets = {"train": numbered(SIZE), "val": numbered(SIZE)}

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        pred, loss = super().evaluate_step(data)
        self.log_metric("largest", data[0].max())
        return pred, loss


def mean_loss(samples: int) -> float:
    """Return the mean over the first samples of (2 i - i)^2."""
    return float((torch.arange(samples, dtype=torch.float64) ** 2).mean())


def read(config: dict[str, Any], split: str) -> dict[str, Any]:
    with Numbers(config) as runner:
        rows = [float(row) for row in runner.infer(split)]
        streamed = [float(row) for row in runner.infer(split, stream=True)]
        bounded = runner.evaluate_steps(split, 2)
        return {
            "rows": rows,
            "streamed": streamed,
            "bounded": bounded,
            "whole": runner.evaluate(split)[split],
        }


ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {"dataloader.shuffle": True},
    "drop_last": {"dataloader.drop_last": True},
    "both": {"dataloader.shuffle": True, "dataloader.drop_last": True, "dataloader.num_workers": 2},
    "an update's size": {"dataloader.global_batch_size": 8, "dataloader.shuffle": True},
    "neither": {},
}


@pytest.mark.parametrize("split", ["val", "train"])
@pytest.mark.parametrize(
    ("order", "ranks"),
    [*((order, 1) for order in ORDERS), ("both", 2), ("an update's size", 2), ("sharded", 2)],
)
def test_every_sample_is_read_once_in_the_order_of_the_dataset(
    order: str, ranks: int, split: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, **ORDERS.get(order, ORDERS["both"]))
    if order == "sharded":
        config |= {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
    size = 4
    if "dataloader.global_batch_size" in config:
        size = 8 // ranks
        config.pop("dataloader")
    found = (
        run_processes(read, config, split, world_size=ranks) if ranks > 1 else [read(config, split)]
    )
    everything = [float(number) for number in range(SIZE)]
    first = min(2 * size * ranks, SIZE)
    for rank in found:
        assert rank["rows"] == pytest.approx(everything)
        assert rank["whole"]["loss"] == pytest.approx(mean_loss(SIZE), rel=1e-6)
        assert rank["bounded"]["loss"] == pytest.approx(mean_loss(first), rel=1e-6)
        assert rank["bounded"]["samples"] == first
    assert sorted(row for rank in found for row in rank["streamed"]) == pytest.approx(everything)


@pytest.mark.parametrize("where", ["in the section of the split", "in a loader", "in a hook"])
def test_given_order_of_a_split_counts(where: str, tmp_path: Path) -> None:
    class Own(Numbers):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            if where == "in a loader":
                self.dataloaders["val"] = DataLoader(numbered(SIZE), batch_size=4, drop_last=True)

        def build_datasampler(self, split: str, dataset: Any) -> Any:
            return (
                SubsetRandomSampler(range(20)) if where == "in a hook" and split == "val" else None
            )

    own = {"dataloader.val.drop_last": True} if "section" in where else {}
    with Own(settings(tmp_path, **own)) as runner:
        assert len(runner.infer("val")) == 20


def test_sampler_for_all_splits_is_for_training(tmp_path: Path) -> None:
    with Numbers(settings(tmp_path, epochs=1, **{"dataloader.sampler": list(range(8))})) as runner:
        runner.train()
        assert runner.train_state.samples == 8
        assert len(runner.infer("val")) == SIZE


class Yielded(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Any]:
        yield from numbered(SIZE)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_ragged_batch_of_an_iterable_dataset_is_evaluated(workers: int, tmp_path: Path) -> None:
    class Yields(Numbers):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            self.datasets["val"] = Yielded()

    with Yields(
        settings(tmp_path, **{"dataloader.drop_last": True, "dataloader.num_workers": workers})
    ) as runner:
        assert len(runner.infer("val")) == SIZE
        assert runner.evaluate("val")["val"]["loss"] == pytest.approx(mean_loss(SIZE), rel=1e-6)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"dataloader.shuffle": True},
            "all 21 samples of split 'val', in the order of the dataset. Only training reads by dataloader.shuffle.",
        ),
        ({"dataloader.val.shuffle": True}, None),
        (
            {"dataloader.val.shuffle": True, "steps": 4},
            "the first 4 of 21 samples of split 'val', in their own order.",
        ),
        (
            {"steps": 4, "dataloader.drop_last": True},
            "the first 4 of 21 samples of split 'val', in the order of the dataset.",
        ),
        ({}, None),
    ],
)
def test_one_line_names_the_samples_read(
    more: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "danling")
    with Numbers(
        settings(tmp_path, **{"epochs": None if "steps" in more else 2, **more})
    ) as runner:
        runner.train()
        runner.infer("val")
    lines = [message for message in caplog.messages if message.startswith("An evaluation reads")]
    assert [said in line for line in lines if said] == [True] * (said is not None) and len(
        lines
    ) == (said is not None)


def read_first(config: dict[str, Any]) -> tuple[float, list[str]]:
    """Evaluate the first three batches; return how many samples were counted, and what was logged of them."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("danling").addHandler(handler)
    with Numbers(config) as runner:
        samples = runner.evaluate_steps("val", 3)["samples"]
    return samples, [line for line in lines if line.startswith("An evaluation reads")]


@pytest.mark.parametrize(("how", "samples"), [("fast", 12), ("canonical", 6)])
def test_line_names_the_samples_of_all_ranks(how: str, samples: int, tmp_path: Path) -> None:
    sizes = {"batch_size": None, "global_batch_size": 8, "micro_batch_size": 2}
    found = run_processes(
        read_first, settings(tmp_path, gradient_sum=how, dataloader=sizes), world_size=2
    )
    assert [counted for counted, _ in found] == [samples, samples]
    assert [line.split(" samples of")[0] for line in found[0][1]] == [
        f"An evaluation reads the first {samples} of 21"
    ]
