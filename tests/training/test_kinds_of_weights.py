"""What a micro-batch weighs where the batch is of lists, and where the criterion has weights of its own: compared with a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import danling as dl
from danling.training import count_samples, criterion_weight

SAMPLES, CHANNELS = 10, 3


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


# Samples of their own sizes


class Clouds(Dataset[tuple[Tensor, Any]]):
    """Points with a value each: as many in each sample as `sizes` says, with targets as `kind` says."""

    def __init__(self, sizes: Callable[[int], int], kind: str) -> None:
        self.sizes, self.kind = sizes, kind

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        drawn = torch.Generator().manual_seed(index)
        points = torch.randn(self.sizes(index), 4, generator=drawn, dtype=torch.float64)
        values = torch.randn(len(points), generator=drawn, dtype=torch.float64)
        return points, values[None] if self.kind == "tensors" else {"values": values}


def transposed(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples))


def named(samples: list[Any]) -> dict[str, list[Any]]:
    points, values = zip(*samples)
    return {"points": list(points), "values": list(values)}


def make_line() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean over the samples of their mean errors."""
    points, values = (batch["points"], batch["values"]) if isinstance(batch, dict) else batch
    targets = [each["values"] if isinstance(each, dict) else each[0] for each in values]
    errors = [
        functional.mse_loss(model(each)[:, 0], target) for each, target in zip(points, targets)
    ]
    return torch.stack(errors).mean()


class Lists(dl.Runner):
    def __init__(
        self, config: Mapping[str, Any], dataset: Clouds, collate: Any, own_loader: bool
    ) -> None:
        super().__init__(config)
        self.model = make_line()
        if own_loader:
            loaders = (DataLoader(dataset, batch_size=4, collate_fn=collate) for _ in range(2))
            self.dataloaders = dict(zip(("train", "val"), loaders))
        else:
            self.datasets = {"train": dataset, "val": dataset}

    def train_step(self, data: Any) -> tuple[None, Tensor]:
        loss = loss_of(self.model, data)
        self.backward(loss)
        return None, loss

    def evaluate_step(self, data: Any) -> tuple[None, Tensor]:
        return None, loss_of(self.model, data)

    def infer_step(self, data: Any) -> list[Tensor]:
        points = data["points"] if isinstance(data, dict) else data[0]
        return [self.model(each) for each in points]


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize("collate", [transposed, named])
@pytest.mark.parametrize("kind", ["tensors", "mappings"])
@pytest.mark.parametrize(
    "sizes", [lambda index: 1 + index % 4, lambda index: CHANNELS], ids=["ragged", "images"]
)
def test_a_batch_of_lists_weighs_its_samples(
    sizes: Any, kind: str, collate: Any, own_loader: bool, tmp_path: Path
) -> None:
    dataset = Clouds(sizes, kind)
    # The micro-batches have 4, 4 and 2 samples.
    loader = {"batch_size": 4, "shuffle": False, "drop_last": False, "collate_fn": collate}
    config = settings(
        tmp_path, epochs=1, accum_steps=3, dataloader=loader, optim={"type": "sgd", "lr": 0.1}
    )
    if own_loader:
        del config["dataloader"]
    model = make_line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = transposed([dataset[index] for index in range(SAMPLES)])
    loss_of(model, whole).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with Lists(config, dataset, collate, own_loader) as runner:
        runner.train()
        found, loss = weights_of(runner.model), runner.results[1]["val"]["loss"]
        predictions = runner.infer("val")
    torch.testing.assert_close(found, weights_of(model), rtol=0, atol=1e-12)
    assert len(predictions) == SAMPLES
    assert loss == pytest.approx(loss_of(model, whole).item(), abs=1e-12)


class Padded(Lists):
    """Its batches are sequences with the time first, lengths and values."""

    sequences = 0

    def loss_of(self, data: Any) -> Tensor:
        return functional.mse_loss(self.model(data[self.sequences].sum(0))[:, 0], data[2])

    def train_step(self, data: Any) -> tuple[None, Tensor]:
        loss = self.loss_of(data)
        self.backward(loss)
        return None, loss

    def evaluate_step(self, data: Any) -> tuple[None, Tensor]:
        return None, self.loss_of(data)


class Weighed(Padded):
    def batch_weight(self, data: Any, target: Any) -> float:
        return float(len(data[2]))


class Later(Padded):
    sequences = 1


def time_first(samples: list[Any]) -> tuple[Tensor, ...]:
    points, values = zip(*samples)
    lengths = torch.tensor([len(each) for each in points])
    return nn.utils.rnn.pad_sequence(points), lengths, torch.stack([each.mean() for each in values])


def time_last(samples: list[Any]) -> tuple[Tensor, ...]:
    points, lengths, values = time_first(samples)
    return lengths, points, values


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize(
    ("kind", "collate", "is_named"),
    [(Padded, time_first, True), (Weighed, time_first, False), (Later, time_last, False)],
)
def test_a_batch_that_weighs_its_time_is_named_once(
    kind: Any,
    collate: Any,
    is_named: bool,
    own_loader: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = {"batch_size": 4, "shuffle": False, "drop_last": False, "collate_fn": collate}
    config = settings(tmp_path, epochs=2, dataloader=loader)
    if own_loader:
        del config["dataloader"]
    with kind(
        config, Clouds(lambda index: 5 + index % 2, "tensors"), collate, own_loader
    ) as runner:
        runner.train()
    assert caplog.text.count("A batch of 4 samples weighs 6") == is_named


# Targets of their own lengths


class Speech(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        frames = torch.randn(12, 4, generator=drawn, dtype=torch.float64)
        return frames, torch.randint(1, 5, (1 + index % 5,), generator=drawn)


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    frames, labels = zip(*samples)
    target = nn.utils.rnn.pad_sequence(list(labels), batch_first=True)
    return {
        "input": torch.stack(frames),
        "target": target,
        "lengths": torch.tensor([len(each) for each in labels]),
    }


def joined(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {**padded(samples), "target": torch.cat([labels for _, labels in samples])}


def ctc_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    scores = model(batch["input"]).log_softmax(-1).transpose(0, 1)
    frames = torch.full((scores.shape[1],), len(scores))
    return functional.ctc_loss(scores, batch["target"], frames, batch["lengths"])


class Transcribing(dl.Runner):
    def __init__(self, config: Mapping[str, Any], criterion: Any) -> None:
        super().__init__(config)
        torch.manual_seed(0)
        self.model, self.criterion = nn.Linear(4, 5).double(), criterion
        self.datasets = {"train": Speech(), "val": Speech()}

    def train_step(self, data: Any) -> tuple[None, Tensor]:
        loss = ctc_of(self.model, data)
        self.backward(loss)
        return None, loss

    def evaluate_step(self, data: Any) -> tuple[None, Tensor]:
        return None, ctc_of(self.model, data)


@pytest.mark.parametrize(
    "criterion", [nn.CTCLoss(), functional.ctc_loss, partial(functional.ctc_loss, blank=0)]
)
@pytest.mark.parametrize("collate", [padded, joined])
def test_a_batch_of_ctc_weighs_its_samples(collate: Any, criterion: Any, tmp_path: Path) -> None:
    loader = {"batch_size": 4, "shuffle": False, "drop_last": False, "collate_fn": collate}
    config = settings(tmp_path, epochs=1, accum_steps=3, dataloader=loader)
    torch.manual_seed(0)
    model = nn.Linear(4, 5).double()
    whole = collate([Speech()[index] for index in range(SAMPLES)])
    before = ctc_of(model, whole)
    before.backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with Transcribing(config, criterion) as runner:
        runner.train()
        found, results = weights_of(runner.model), runner.results[1]
    torch.testing.assert_close(found, weights_of(model), rtol=0, atol=1e-12)
    assert results["train"]["loss"] == pytest.approx(before.item(), abs=1e-12)
    assert results["val"]["loss"] == pytest.approx(ctc_of(model, whole).item(), abs=1e-12)


# Samples that a collate function leaves out

BAD = {1, 2, 3, 6}
"""Samples that cannot be read: of the batches of 4, 1, 3 and 2 samples are left."""


class Holes(Dataset[tuple[Tensor, Tensor] | None]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | None:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return None if index in BAD else (point, point.sum() + index)


def without_holes(samples: list[tuple[Tensor, Tensor] | None]) -> list[Tensor]:
    left = [sample for sample in samples if sample is not None]
    return [torch.stack(each) for each in zip(*left)]


class Left(dl.Runner):
    def __init__(self, config: Mapping[str, Any], own_loader: bool) -> None:
        super().__init__(config)
        self.model, self.criterion = nn.Sequential(make_line(), nn.Flatten(0)), nn.MSELoss()
        self.metrics = {
            "number": lambda pred, target: (pred - target).abs().mean(),
            "numbers": lambda pred, target: (pred - target).abs(),
        }
        if own_loader:
            loaders = (
                DataLoader(Holes(), batch_size=4, collate_fn=without_holes) for _ in range(2)
            )
            self.dataloaders = dict(zip(("train", "val"), loaders))
        else:
            self.datasets = {"train": Holes(), "val": Holes()}

    def infer_step(self, data: Any) -> dict[str, Tensor]:
        return {"pred": self.model(data[0])}


@pytest.mark.parametrize("own_loader", [False, True])
def test_metrics_count_the_samples_that_a_collate_function_has_left(
    own_loader: bool, tmp_path: Path
) -> None:
    loader = {"batch_size": 4, "shuffle": False, "drop_last": False, "collate_fn": without_holes}
    config = settings(tmp_path, epochs=1, accum_steps=3, train_metrics=True, dataloader=loader)
    if own_loader:
        del config["dataloader"]
    points, targets = without_holes([Holes()[index] for index in range(SAMPLES)])
    model = make_line()
    before = float((model(points)[:, 0].detach() - targets).abs().mean())
    functional.mse_loss(model(points)[:, 0], targets).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = model(points)[:, 0].detach()
    after = float((expected - targets).abs().mean())
    with Left(config, own_loader) as runner:
        runner.train()
        results = runner.results[1]
        predictions = runner.infer("val")
        bounded = runner.evaluate_steps("val", 2)
    for name in ("number", "numbers"):
        assert results["train"][name] == pytest.approx(before, abs=1e-12)
        assert results["val"][name] == pytest.approx(after, abs=1e-12)
        assert bounded[name] == pytest.approx(
            float((expected - targets)[:4].abs().mean()), abs=1e-12
        )
    assert bounded["samples"] == 4
    assert [row["pred"] for row in predictions] == pytest.approx(expected.tolist(), abs=1e-12)


class Pictures(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3, 2, 2), float(index), dtype=torch.float64)


def as_read(samples: list[Tensor]) -> list[Tensor]:
    return samples


def with_boxes(samples: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the pictures, and boxes of all of them in one tensor: none of the first batch, one of each other."""
    return samples, torch.zeros(int(samples[0].mean() > 0), 5)


def nested(samples: list[Tensor]) -> dict[str, Any]:
    return {"pictures": torch.nested.nested_tensor(samples), "target": torch.zeros(len(samples))}


class Averages(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.model, self.metrics = make_line(), {"mean": lambda pred, _: pred.mean()}
        self.datasets = {"val": Pictures()}

    def infer_step(self, data: Any) -> Tensor:
        pictures = (
            data["pictures"].unbind()
            if isinstance(data, dict)
            else data
            if isinstance(data, list)
            else data[0]
        )
        return torch.stack([picture.mean() for picture in pictures])

    def evaluate_step(self, data: Any) -> tuple[Tensor, None]:
        return self.infer_step(data), None


@pytest.mark.parametrize("collate", [as_read, with_boxes, nested])
def test_a_list_with_an_entry_for_each_sample_has_all(collate: Any, tmp_path: Path) -> None:
    with Averages(
        settings(tmp_path, dataloader={"batch_size": 5, "collate_fn": collate})
    ) as runner:
        result, predictions = runner.evaluate_steps("val", 2), runner.infer("val")
    assert result["samples"] == SAMPLES
    assert result["mean"] == pytest.approx(sum(range(SAMPLES)) / SAMPLES, abs=1e-12)
    assert [float(each) for each in predictions] == pytest.approx(list(range(SAMPLES)), abs=1e-12)


def test_columns_are_told_from_samples() -> None:
    columns = [torch.zeros(4, 2), torch.zeros(4, 7)]
    assert count_samples([columns, {"a": 1}]) == 4
    assert count_samples([columns, torch.zeros(4)]) == 4
    assert count_samples([[torch.zeros(5, 2), torch.zeros(3, 2)], [{}, {}]]) == 2
    assert (
        count_samples(
            {"images": [torch.zeros(3, 8, 8)] * 2, "boxes": [torch.zeros(5, 4), torch.zeros(0, 4)]}
        )
        == 2
    )
    # The rows of a batch of several parts, such as the nodes and the edges of graphs.
    assert count_samples([torch.zeros(6, 2), torch.zeros(2, 9), torch.zeros(3)]) == 6


# Criterions with a `weight` that is not one of classes


class Margin(nn.Module):
    """Learns a direction for each class, in a parameter that is called as everywhere."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(3, 5, generator=drawn, dtype=torch.float64))

    def forward(self, embedding: Tensor, target: Tensor) -> Tensor:
        cosines = functional.normalize(embedding) @ functional.normalize(self.weight).T
        return functional.cross_entropy(8 * cosines, target)


class Uncertain(nn.Module):
    """Weighs two losses by what it has learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        losses = torch.stack([functional.cross_entropy(pred, target), pred.square().mean()])
        return (losses * torch.exp(-self.weight)).sum() + self.weight.sum()


def make_data() -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    inputs = torch.randn(16, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (16,), generator=drawn))


def make_embedding() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 5).double()


KINDS: dict[str, type[nn.Module]] = {"margin": Margin, "uncertain": Uncertain}


class Learned(dl.Runner):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.datasets = {"train": make_data()}
        self.model, self.criterion = make_embedding(), KINDS[self.config.kind]()


def train(config: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    with Learned(config) as runner:
        runner.train()
        return [weights_of(runner.unwrapped_model), weights_of(runner.criterion)]


@pytest.mark.parametrize(("world_size", "accumulated"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_learned_weights_of_a_criterion_weigh_no_class(
    kind: str, world_size: int, accumulated: int, tmp_path: Path
) -> None:
    model, criterion = make_embedding(), KINDS[kind]()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    inputs, targets = make_data().tensors
    for batch in torch.arange(16).reshape(2, 8):
        optimizer.zero_grad()
        criterion(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    loader = {"batch_size": 4, "shuffle": False}
    config = settings(
        tmp_path,
        steps=2,
        accum_steps=accumulated,
        dataloader=loader,
        optim={"type": "sgd", "lr": 0.1},
    )
    for found in run_processes(train, {**config, "kind": kind}, world_size=world_size):
        torch.testing.assert_close(
            found, [weights_of(model), weights_of(criterion)], rtol=0, atol=1e-12
        )


def test_weights_of_classes_weigh_the_targets() -> None:
    targets = torch.tensor([0, 2, 2])
    assert (
        criterion_weight(nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0])), targets, None) == 7.0
    )
    assert (
        criterion_weight(Margin(), targets, None)
        == criterion_weight(Uncertain(), targets, None)
        == 3.0
    )
