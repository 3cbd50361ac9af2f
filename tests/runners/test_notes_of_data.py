"""Mistakes in data and criteria: one line names the split, the sample and the shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset

import danling as dl


class Rows(Dataset[Any]):
    """Ten rows; that of a sample can be of another length, and `len()` can promise more."""

    def __init__(self, *, length: int = 10, odd: int | None = None) -> None:
        self.length, self.odd = length, odd
        self.inputs = torch.ones(10, 4)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        return row[:3] if index == self.odd else row, torch.tensor(index % 2)


class Stream(IterableDataset[Any]):
    def __init__(self, *, odd: int | None = None, broken: int | None = None) -> None:
        self.odd, self.broken = odd, broken

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(10):
            if index == self.broken:
                raise KeyError("label")
            yield torch.ones(3 if index == self.odd else 4), torch.tensor(0)


class Toy(dl.Runner):
    def __init__(
        self, dataset: object, criterion: Callable[..., Any] | None = None, **settings: Any
    ) -> None:
        loader = {"batch_size": 4, "shuffle": False, **settings.pop("dataloader", {})}
        super().__init__({"epochs": 1, "seed": 1, "log": False, "dataloader": loader, **settings})
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        self.datasets = {"train": dataset}


def failure_of(runner: dl.Runner) -> tuple[Exception, str]:
    """Return the error of a training, and what a user reads of it: the message and the notes."""
    with runner, pytest.raises(Exception) as caught:
        runner.train()
    notes = getattr(caught.value, "__notes__", [])
    return caught.value, "\n".join([str(caught.value), *notes])


SHAPES = (
    "4 samples of split 'train' could not be made into a batch: sample {0} is (float32 (4,) on cpu, int64 () on cpu), "
    "sample {1} is (float32 (3,)"
)
READ = [
    (
        Rows(length=12),
        {},
        "Reading sample 10 of split 'train' failed, a Rows whose len() is 12. If it has fewer samples, fix its __len__.",
    ),
    (Rows(odd=6), {}, SHAPES.format(4, 6)),
    (Rows(odd=6), {"collate_fn": torch.utils.data.default_collate}, SHAPES.format(4, 6)),
    (Stream(broken=5), {}, "Reading item 5 of split 'train' failed (a Stream, pass 0, rank 0"),
    (Stream(odd=6), {}, SHAPES.format(4, 6)),
]
IDS = ["length", "shape", "own-collate", "stream", "stream-shape"]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("dataset", "loader", "said"), READ, ids=IDS)
def test_an_error_of_reading_names_split_sample_and_shapes(
    dataset: Dataset[Any], loader: dict[str, Any], said: str, workers: int
) -> None:
    _, text = failure_of(Toy(dataset, dataloader={**loader, "num_workers": workers}))
    assert text.count(said) == 1


def parts(pred: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"entropy": nn.functional.cross_entropy(pred, target)}


def pair(pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return pred.mean(), pred.std()


def one(pred: Tensor) -> Tensor:
    return pred.mean()


class OneOfModule(nn.Module):
    def forward(self, pred: Tensor) -> Tensor:
        return pred.mean()


CRITERIA = [
    (
        parts,
        "Received: a dict with the keys ['entropy']. Override `compute_loss` to return the sum",
    ),
    (pair, "Received: a tuple of 2. Override `compute_loss` to return the one that is trained on"),
    (
        one,
        "The criterion is called as criterion(prediction, target). Received: one that is defined as (pred: ",
    ),
    (
        OneOfModule(),
        "The criterion is called as criterion(prediction, target). Received: one that is defined as (pred: ",
    ),
]


@pytest.mark.parametrize(
    ("criterion", "said"), CRITERIA, ids=["mapping", "pair", "one-argument", "module"]
)
def test_mismatched_criterion_is_named_with_shapes(
    criterion: Callable[..., Any], said: str
) -> None:
    _, text = failure_of(Toy(Rows(), criterion))
    assert said in text
    assert "train_step on split 'train' received (float32 (4, 4) on cpu" in text


def test_criterion_with_one_parameter_is_named_if_batches_have_no_target() -> None:
    _, text = failure_of(Toy([torch.ones(4)] * 8, one))
    assert "The criterion is called as criterion(prediction, target)" in text
    assert "Expected a batch with a target" not in text


def test_a_type_error_inside_a_criterion_is_not_taken_for_its_signature() -> None:
    def criterion(pred: Tensor, target: Tensor) -> Tensor:
        return pred + "text"  # type: ignore[operator]

    _, text = failure_of(Toy(Rows(), criterion))
    assert "criterion(prediction, target)" not in text


@pytest.mark.parametrize(
    ("value", "mend"), [("great", "log_text(name, text)"), (torch.ones(2), "by .mean()")]
)
def test_figures_other_than_numbers_are_named(value: Any, mend: str) -> None:
    with (
        Toy(Rows()) as runner,
        pytest.raises(ValueError, match="single number for metric 'val/note'") as caught,
    ):
        runner.log_figures({"val/loss": 1.0, "val/note": value})
    assert mend in str(caught.value)


class Poisoned(Dataset[Any]):
    """Rows as mappings, of which one has NaN; `samples` lists files as torchvision does."""

    def __init__(self, value: float, *, paths: bool) -> None:
        self.value, self.paths = value, paths
        self.samples = [(f"images/{index}.png", 0) for index in range(12)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.ones(4)
        if index == 7:
            row[2] = self.value
        found = {"input": row, "target": torch.tensor(index % 2)}
        return {**found, "image_path": f"own/{index}.png"} if self.paths else found


ORDERS: dict[str, dict[str, Any]] = {
    "in order": {},
    "shuffled": {"dataloader": {"shuffle": True}},
    "accumulated": {"dataloader": {"shuffle": True}, "accum_steps": 3},
    "whole updates": {
        "dataloader": {
            "shuffle": True,
            "global_batch_size": 12,
            "micro_batch_size": 5,
            "batch_size": None,
        }
    },
    "workers": {"dataloader": {"shuffle": True, "num_workers": 1}},
}


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_nonfinite_value_of_the_data_is_named_with_its_sample(
    order: str, skips: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "The data has NaN in 'input' of sample 7 of split 'train' (image_path='own/7.png')"
    runner = Toy(Poisoned(float("nan"), paths=True), skip_nonfinite_grad=skips, **ORDERS[order])
    if skips:
        with runner:
            runner.train()
        text = re.sub(r" of update \d+", "", capfd.readouterr().err)
        assert text.count(said) == 1
        return
    error, text = failure_of(runner)
    assert isinstance(error, FloatingPointError)
    assert said in text


@pytest.mark.parametrize(("value", "called"), [(float("nan"), "NaN"), (float("-inf"), "infinity")])
def test_file_of_a_sample_is_found_within_subsets(value: float, called: str) -> None:
    subset = Subset(Subset(Poisoned(value, paths=False), range(4, 12)), [5, 4, 3, 2])
    _, text = failure_of(Toy(subset))
    assert f"The data has {called} in 'input' of sample 2 of split 'train' (images/7.png)" in text


def test_finite_data_is_said_to_be_finite() -> None:
    _, text = failure_of(Toy(Rows(), lambda pred, target: pred.sum() / 0.0))
    assert "The data of the update is finite. Lower the learning rate" in text


def test_row_is_named_in_batches_of_the_program() -> None:
    with (
        Toy(Rows()) as runner,
        pytest.raises(
            FloatingPointError, match="NaN in 'input' of row 1 of micro-batch 1 "
        ) as caught,
    ):
        runner.train_step((torch.tensor([[1.0] * 4, [float("nan")] * 4]), torch.tensor([0, 1])))
        runner.step()
    assert "split" not in str(caught.value)
