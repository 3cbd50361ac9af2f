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
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

import danling as dl
from danling.training import count_samples, criterion_weight
from danling.training.sample_count import find_samples

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


# Batches of all kinds of parts

BAD = {1, 2, 3, 6}
"""Samples that cannot be read: of the batches of 4, 1, 3 and 2 samples are left."""


class Sequences(Dataset[tuple[Tensor, Tensor] | None]):
    """Points with a value each, up to 8 of them. `steps` is that of all samples; `None` gives each its own."""

    def __init__(self, steps: int | None = None, bad: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.steps, self.bad = steps, bad

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | None:
        if index in self.bad:
            return None
        drawn = torch.Generator().manual_seed(index)
        steps = self.steps or 5 + index % 4
        points = torch.randn(steps, 4, generator=drawn, dtype=torch.float64)
        return points, torch.randn(steps, generator=drawn, dtype=torch.float64)


class Form:
    """How samples are put into a batch, and taken out of it again."""

    def __init__(self, join: Callable[..., Any], take: Callable[[Any], Any]) -> None:
        self.join, self.take = join, take

    def collate(self, samples: list[tuple[Tensor, Tensor] | None]) -> Any:
        points, values = zip(*(sample for sample in samples if sample is not None))
        lengths = torch.tensor([len(each) for each in points])
        return self.join(points, values, lengths)

    def error(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over the samples of their mean errors."""
        samples = self.take(batch)
        errors = [
            functional.mse_loss(model(points)[:, 0], torch.as_tensor(values))
            for points, values in samples
        ]
        return torch.stack(errors).mean()


def pad(parts: Any, batch_first: bool = True) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(parts), batch_first=batch_first)


def cut(points: Tensor, values: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:n], y[:n]) for x, y, n in zip(points, values, lengths.tolist())]


def rows_of(packed: Any) -> list[Tensor]:
    return list(nn.utils.rnn.unpack_sequence(packed))


def pack(parts: Any) -> Any:
    return nn.utils.rnn.pack_sequence(list(parts), enforce_sorted=False)


FORMS = {
    "pairs of pairs": Form(
        lambda x, y, n: ((pad(x), n), (pad(y), n)), lambda b: cut(b[0][0], b[1][0], b[0][1])
    ),
    "as many entries as samples": Form(
        lambda x, y, n: (pad(x), pad(y), n, n), lambda b: cut(b[0], b[1], b[2])
    ),
    "joined first": Form(
        lambda x, y, n: (torch.cat(y), n, pad(x)),
        lambda b: cut(b[2], pad(b[0].split(b[1].tolist())), b[1]),
    ),
    "time first": Form(
        lambda x, y, n: (pad(x, False), n, pad(y, False)),
        lambda b: cut(b[0].transpose(0, 1), b[2].T, b[1]),
    ),
    "packed": Form(
        lambda x, y, n: (pack(x), pack(y)), lambda b: list(zip(rows_of(b[0]), rows_of(b[1])))
    ),
    "dictionaries": Form(
        lambda x, y, n: [{"points": each, "values": v} for each, v in zip(x, y)],
        lambda b: [(each["points"], each["values"]) for each in b],
    ),
    "arrays": Form(
        lambda x, y, n: {"points": list(x), "values": pad(y).numpy(), "lengths": n.numpy()},
        lambda b: [(x, y[: len(x)]) for x, y in zip(b["points"], b["values"])],
    ),
}


class Formed(dl.Runner):
    def __init__(
        self, config: Mapping[str, Any], dataset: Sequences, form: Form, own_loader: bool
    ) -> None:
        super().__init__(config)
        self.model, self.form = make_line(), form
        self.metrics = {"error": lambda pred, _: pred}
        if own_loader:
            order = BatchSampler(SequentialSampler(range(SAMPLES)), 4, drop_last=False)
            self.dataloaders = {
                split: DataLoader(dataset, batch_sampler=order, collate_fn=form.collate)
                for split in ("train", "val")
            }
        else:
            self.datasets = {"train": dataset, "val": dataset}

    def train_step(self, data: Any) -> tuple[None, Tensor]:
        loss = self.form.error(self.model, data)
        self.backward(loss)
        return None, loss

    def evaluate_step(self, data: Any) -> tuple[Tensor, Tensor]:
        loss = self.form.error(self.model, data)
        return loss, loss


def compare_with_hand(form: Form, dataset: Sequences, own_loader: bool, folder: Path) -> None:
    """Train one update of micro-batches of 4, 4 and 2 samples that are read, and compare with the whole batch by hand."""
    loader = {"batch_size": 4, "shuffle": False, "drop_last": False, "collate_fn": form.collate}
    config = settings(
        folder, epochs=1, accum_steps=3, dataloader=loader, optim={"type": "sgd", "lr": 0.1}
    )
    if own_loader:
        del config["dataloader"]
    whole = form.collate([dataset[index] for index in range(SAMPLES)])
    model = make_line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    form.error(model, whole).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    with Formed(config, dataset, form, own_loader) as runner:
        runner.train()
        found, results = weights_of(runner.model), runner.results[1]["val"]
    torch.testing.assert_close(found, weights_of(model), rtol=0, atol=1e-12)
    expected = form.error(model, whole).item()
    assert results["loss"] == pytest.approx(expected, abs=1e-12)
    assert results["error"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("steps", "own_loader"), [(None, False), (4, False), (None, True)])
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_weighs_the_samples_that_were_read(
    form: str, steps: int | None, own_loader: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its first tensor is, also where the time has as many steps as a batch has samples, or twice as many."""
    compare_with_hand(FORMS[form], Sequences(steps), own_loader, tmp_path)
    assert "how many samples it has" not in caplog.text


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize(
    "form", ["pairs of pairs", "as many entries as samples", "packed", "dictionaries"]
)
def test_a_batch_weighs_the_samples_that_are_left(
    form: str, own_loader: bool, tmp_path: Path
) -> None:
    compare_with_hand(FORMS[form], Sequences(bad=BAD), own_loader, tmp_path)


class Weighed(Formed):
    def batch_weight(self, data: Any, target: Any) -> float:
        return float(len(self.form.take(data)))


ONLY_TIME_FIRST = Form(
    lambda x, y, n: {"points": pad(x, False), "values": pad(y, False)},
    lambda b: list(zip(b["points"].transpose(0, 1), b["values"].T)),
)


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize(
    ("kind", "form", "bad", "is_named"),
    [
        (Formed, FORMS["joined first"], BAD, True),
        (Formed, FORMS["time first"], BAD, True),
        (Weighed, FORMS["joined first"], BAD, False),
        (Formed, ONLY_TIME_FIRST, set(), True),
        (Weighed, ONLY_TIME_FIRST, set(), False),
    ],
)
def test_a_batch_whose_parts_do_not_tell_its_samples_is_named_once(
    kind: Any,
    form: Form,
    bad: set[int],
    is_named: bool,
    own_loader: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = {"batch_size": 4, "shuffle": False, "drop_last": False, "collate_fn": form.collate}
    config = settings(tmp_path, epochs=2, dataloader=loader)
    if own_loader:
        del config["dataloader"]
    with kind(config, Sequences(bad=bad), form, own_loader) as runner:
        runner.train()
    assert caplog.text.count("how many samples it has") == is_named


def test_documents_joined_in_one_row_are_named() -> None:
    row = torch.zeros(1, 64)
    assert find_samples({"ids": row, "positions": row}, 5) == (1, False)
    assert find_samples({"ids": row, "ends": torch.zeros(6)}, 5) == (5, False)
    assert find_samples((row, torch.zeros(1)), 5) == (1, True)


def test_batches_of_an_iterable_that_do_not_tell_their_samples_are_named() -> None:
    x, n = torch.zeros(3, 7, 4), torch.zeros(3, dtype=torch.int64)
    joined = torch.zeros(11, dtype=torch.int64)
    for batch, expected in (
        (((x, n), (x[..., 0].long(), n)), (3, True)),
        (((x, n), (joined, n)), (3, False)),
        ((x.transpose(0, 1), n), (7, False)),
        ([x, x, x], (3, True)),
        ([x[0], x[0, :5], x[0, :2], x[0, :2]], (4, False)),
        (object(), (1, False)),
        (7, (1, True)),
    ):
        assert find_samples(batch) == expected


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
