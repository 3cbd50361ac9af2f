"""Targets are found under the names that the field uses, and weigh what the loss was averaged over; which batches have a loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.language import Encoding, Output, TinyForCausalLM, TinyForMaskedLM, encode, sentences
from torch import Tensor, nn

import danling as dl
from danling.data import PLACEHOLDER, Batch
from danling.runners import TorchRunner
from danling.training import (
    TARGET_NAMES,
    count_samples,
    count_tokens,
    criterion_weight,
    model_loss,
    model_weight,
    peek_target,
    prediction_of,
    shifts_labels,
    unpack_batch,
)
from danling.training.batch_weights import BatchLoss
from danling.training.batches import returned_loss


@pytest.mark.parametrize("name", TARGET_NAMES)
@pytest.mark.parametrize("kind", [dict, Encoding])
def test_a_target_is_found_under_every_name(name: str, kind: Any) -> None:
    target = torch.arange(3)
    batch = kind({"input": torch.zeros(3, 2), name: target})
    assert unpack_batch(batch)[1] is target
    assert peek_target(batch) is target
    assert count_samples(batch) == 3


def test_model_is_called_with_its_own_keywords() -> None:
    batch = encode(sentences(4))
    inputs, target = unpack_batch(batch, TinyForCausalLM())
    assert list(inputs) == ["input_ids", "attention_mask", "labels"]
    assert target is batch["labels"]
    assert count_tokens(batch) == batch["input_ids"].numel()
    assert count_tokens(torch.zeros(2, 3, dtype=torch.uint16)) == 6
    assert [
        count_tokens(torch.zeros(2, 3, dtype=kind))
        for kind in (torch.bool, torch.float16, torch.complex64)
    ] == [0] * 3


def test_keywords_unknown_to_a_model_are_named() -> None:
    class Scores(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    with pytest.raises(ValueError, match=r"Scores.forward takes \(x\).*does not take \['index'\]"):
        unpack_batch({"x": 1, "index": 2, "y": 3}, Scores())
    with pytest.raises(ValueError, match=r"'input' and 'target', or with"):
        unpack_batch({"y": 3}, Scores())
    with pytest.raises(ValueError, match="'input' and 'target'"):
        unpack_batch({"x": 3})


def model_class(name: str, *bases: type, **held: Any) -> Any:
    return type(name, bases or (nn.Linear,), held)


GPT2 = model_class("GPT2LMHeadModel")
CLASSES = [
    (GPT2, True),
    (model_class("MineLMHeadModel", GPT2), True),
    (model_class("Renamed", GPT2), True),
    (model_class("BartForCausalLM"), False),
    (
        model_class(
            "LlavaForConditionalGeneration", config=SimpleNamespace(is_encoder_decoder=False)
        ),
        True,
    ),
    (
        model_class("T5ForConditionalGeneration", config=SimpleNamespace(is_encoder_decoder=True)),
        False,
    ),
    (model_class("Told", shifts_labels=True), True),
    (model_class("ToldNot", GPT2, shifts_labels=False), False),
    (model_class("BertForTokenClassification"), False),
    (nn.Linear, None),
]


class Around(nn.Module):
    """As the module of an adapter: a model inside a model inside a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Sequential()
        self.base_model.model = model


@pytest.mark.parametrize(("kind", "shifts"), CLASSES)
def test_models_with_shifted_labels_are_known_by_their_class(
    kind: type[nn.Linear], shifts: bool | None
) -> None:
    model = kind(2, 2)
    assert shifts_labels(model) is shifts
    assert shifts_labels(Around(model)) is shifts
    assert shifts_labels(torch.compile(model, backend="eager")) is shifts


@pytest.mark.parametrize("kind", [TinyForCausalLM, TinyForMaskedLM])
def test_weight_is_the_number_of_averaged_targets(kind: Any) -> None:
    """By comparison with the sum of the single terms of the loss, divided by the mean that the model returns."""
    model, batch = kind(), encode(sentences(9))
    loss = model(**batch)["loss"]
    ones = [encode([row]) for row in sentences(9)]
    total = sum(
        float(model(**one)["loss"].detach()) * weight
        for one in ones
        if (weight := float(model_weight(model, one["labels"], one)))
    )
    assert total / float(model_weight(model, batch["labels"], batch)) == pytest.approx(
        float(loss), abs=1e-12
    )


def test_output_of_a_model_is_read_as_a_mapping_and_as_an_object() -> None:
    loss, logits = torch.tensor(1.0), torch.zeros(2, 3)
    for output in (
        {"loss": loss, "logits": logits},
        Output(loss=loss, logits=logits),
        SimpleNamespace(loss=loss, logits=logits),
    ):
        assert model_loss(output) is loss
        assert prediction_of(output) is logits
    assert prediction_of(Output(loss=None, logits=logits)) is logits
    other = {"logits": logits, "boxes": logits}
    assert prediction_of(other) is other
    assert prediction_of(logits) is logits


class Graphs:
    """What torch_geometric calls a batch, as far as it is looked at."""

    num_graphs = 3
    x, y = torch.zeros(7, 2), torch.tensor([0, 1, 1])
    ptr = torch.tensor([0, 2, 3, 7])

    def keys(self) -> list[str]:
        return ["x", "y", "ptr"]

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


class OfTensors(nn.Module):
    def forward(self, x: Tensor, ptr: Tensor, weight: Tensor | None = None) -> Tensor:
        return x


class OfGraphs(nn.Module):
    def forward(self, x: Graphs, scale: float = 1.0) -> Tensor:
        return x.x


def test_a_batch_of_graphs_is_handed_over_whole_or_by_its_tensors() -> None:
    batch = Graphs()
    assert count_samples(batch) == count_samples([batch, batch]) == 3
    assert peek_target(batch) is batch.y
    assert unpack_batch(batch) == (batch, batch.y)
    assert unpack_batch(batch, OfGraphs()) == (batch, batch.y)
    inputs, target = unpack_batch(batch, OfTensors())
    assert inputs == {"x": batch.x, "ptr": batch.ptr} and target is batch.y


# What a batch weighs, and which batches have a loss


def batch_loss(
    *overridden: str,
    targetless: bool | None = None,
    options: dict[str, Any] | None = None,
    **runner: Any,
) -> BatchLoss:
    """Return the weights of a run whose hooks of these names are the user's; a batch weighs as many as its target has."""
    data: Any = SimpleNamespace(settings=lambda split: options or {})
    given: dict[str, Any] = {
        "is_main_process": True,
        "criterion": None,
        "device": torch.device("cpu"),
        "train_splits": [],
        "sources": {},
        "datasets": {},
        "batch_weight": lambda data, target: 10.0 if target is None else float(len(target)),
        "compute_loss": lambda pred, target: torch.tensor(7.0),
    }
    hooks: dict[str, Any] = {
        name: getattr(TorchRunner, name) for name in ("compute_loss", "train_step", "batch_weight")
    }
    hooks.update({name: lambda self, *arguments: None for name in overridden})
    made: Any = type("Run", (SimpleNamespace,), hooks)
    found = BatchLoss(made(**{**given, **runner}), data)
    found.targetless = targetless
    return found


PAIR = (torch.ones(3, 2), torch.ones(3))
BARE = Batch(PAIR[0], None, None)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Batch(PAIR, None, None), (3.0, 3)),
        (Batch(PAIR, 2, None), (3.0, 2)),  # the source knows better than the data
        (BARE, (3.0, 3)),
        (Batch(PAIR, 0, 0), (0.0, 0.0)),
        (Batch(PLACEHOLDER, 4, 8), (0.0, 0.0)),
    ],
    ids=["pair", "counted", "bare", "padding", "placeholder"],
)
def test_a_batch_is_weighed_and_counted(batch: Batch, expected: tuple[float, float]) -> None:
    assert batch_loss().weigh(batch, batch.data) == expected


def test_only_the_first_training_batch_decides_about_targets() -> None:
    weights = batch_loss()
    for batch, training, expected in (
        (BARE, False, None),
        (Batch(PAIR, None, None), True, False),
        (BARE, True, False),
    ):
        weights.weigh(batch, batch.data, training=training)
        assert weights.targetless is expected
    own = batch_loss("train_step")
    own.weigh(BARE, BARE.data, training=True)
    assert own.targetless is None


@pytest.mark.parametrize(
    ("criterion", "overridden", "warned"),
    [
        (nn.CrossEntropyLoss(), (), 1),
        (nn.CrossEntropyLoss(), ("batch_weight",), 0),
        (nn.MSELoss(), (), 0),
    ],
)
def test_ignored_index_without_a_match_is_warned_of_once(
    criterion: nn.Module, overridden: tuple[str, ...], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights = batch_loss(*overridden, criterion=criterion)
    for _ in range(2):
        weights.weigh(BARE, BARE.data, training=True)
    assert len(caplog.records) == warned


def test_model_without_a_loss_needs_a_criterion() -> None:
    with pytest.raises(ValueError, match=r"criterion=None and a prediction of type Tensor"):
        returned_loss(torch.ones(2))


@pytest.mark.parametrize(
    ("criterion", "targetless", "overridden", "target", "expected"),
    [
        (nn.MSELoss(), False, (), 1, 7.0),
        (nn.MSELoss(), False, (), None, None),  # training compares with a target, which is missing
        (nn.MSELoss(), True, (), None, 7.0),  # an autoencoder
        (nn.MSELoss(), None, (), None, None),  # nothing tells
        (None, False, ("compute_loss",), None, 0.25),
        (None, None, ("compute_loss",), None, 7.0),
        (None, False, (), 1, 0.25),  # that of the model
    ],
)
def test_loss_of_an_evaluated_batch_follows_targets_and_overrides(
    criterion: Any,
    targetless: bool | None,
    overridden: tuple[str, ...],
    target: Any,
    expected: float | None,
) -> None:
    loss = batch_loss(*overridden, targetless=targetless, criterion=criterion)
    found = loss.of_evaluated(
        {"loss": torch.tensor(0.25)} if criterion is None else torch.ones(1), target
    )
    assert (None if found is None else float(found)) == expected


POSITIONS, STREAM = SimpleNamespace(kind="position"), SimpleNamespace(kind="stream")


class Drawing:
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> Any:
        torch.rand(1)
        return self.samples[index]


@pytest.mark.parametrize(
    ("source", "options", "dataset", "expected"),
    [
        (POSITIONS, {}, Drawing(PAIR), False),
        (POSITIONS, {}, Drawing(PAIR[0]), True),
        (POSITIONS, {}, Drawing(), None),
        (POSITIONS, {"num_workers": 2}, Drawing(PAIR), None),
        (POSITIONS, {"collate_fn": list}, Drawing(PAIR), None),
        (STREAM, {}, Drawing(PAIR), None),
    ],
)
def test_the_first_sample_to_train_on_is_looked_at_without_moving_the_streams(
    source: Any, options: dict[str, Any], dataset: Drawing, expected: bool | None
) -> None:
    weights = batch_loss(
        criterion=nn.MSELoss(),
        train_splits=["other", "train"],
        sources={"train": source},
        datasets={"train": dataset, "val": Drawing(PAIR)},
        options=options,
    )
    torch.manual_seed(3)
    expected_draw = torch.rand(2)
    torch.manual_seed(3)
    weights.of_evaluated(torch.ones(1), None)
    assert weights.targetless is expected and torch.equal(torch.rand(2), expected_draw)


@pytest.mark.parametrize("size", [0, 1, 64, 65])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int64, torch.uint16])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_integer_targets_weigh_their_number_without_the_ignored_ones(
    size: int, kind: torch.dtype, ignored: int
) -> None:
    labels = [number % 5 for number in range(size)]
    expected = sum(label != ignored for label in labels)
    for shape in ((size,), (1, size)):
        target = torch.tensor(labels, dtype=torch.int64).to(kind).reshape(shape)
        assert criterion_weight(nn.CrossEntropyLoss(ignore_index=ignored), target, None) == expected


@dataclass
class Points:
    """A batch of a form of the user's."""

    parts: dict[str, Tensor]
    note: str = ""


@dataclass(slots=True)
class Described:
    note: str
    points: Points = field(repr=False)


def test_samples_of_a_dataclass_are_those_of_its_first_tensor() -> None:
    points = Points({"x": torch.zeros(3, 2), "y": torch.zeros(3)})
    assert (
        count_samples(points)
        == count_samples(Described("abc", points))
        == count_samples((points, torch.zeros(3)))
        == 3
    )
    assert count_samples(Points) == 1


class Fitted(dl.Runner):
    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        points = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
        sizes = points.split([3, 1])
        self.dataloaders = {
            "train": [
                Points({"x": part, "y": part.square().sum(1, keepdim=True)}) for part in sizes
            ]
        }

    def train_step(self, data: Points) -> tuple[None, None]:
        self.backward((self.model(data.parts["x"]) - data.parts["y"]).square().mean())
        return None, None


def test_micro_batches_of_dataclasses_are_weighed_by_their_samples(tmp_path: Path) -> None:
    config = dl.RunnerConfig(seed=1, epochs=1, accum_steps=2, dir=str(tmp_path / "run"), log=False)
    with Fitted(config) as runner:
        runner.train()
        trained = runner.model.weight.detach()
        assert runner.state.train.samples == 4
    points = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    weight = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (points @ weight.T - points.square().sum(1, keepdim=True)).square().mean().backward()
    assert weight.grad is not None
    torch.testing.assert_close(trained, -0.1 * weight.grad, rtol=1e-12, atol=0.0)


class Pair:
    """A batch whose samples no reader can count."""

    def __init__(self, samples: list[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.stack(column) for column in zip(*samples))


class FittedPairs(dl.Runner):
    def __init__(self, config: dl.RunnerConfig) -> None:
        super().__init__(config)
        self.model = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(self.model.weight)
        points = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
        samples = list(zip(points, points.square().sum(1, keepdim=True)))
        self.datasets = {"train": samples, "val": samples}

    def evaluate_step(self, data: Pair) -> tuple[Tensor, Tensor]:
        pred = self.unwrapped_model(data.x)
        return pred, (pred - data.y).square().mean()

    def train_step(self, data: Pair) -> tuple[Tensor, Tensor]:
        pred = self.model(data.x)
        loss = (pred - data.y).square().mean()
        self.backward(loss)
        return pred, loss


def test_micro_batches_of_other_objects_weigh_what_the_loader_has_read(tmp_path: Path) -> None:
    config = dl.RunnerConfig(seed=1, epochs=1, accum_steps=2, dir=str(tmp_path / "run"), log=False)
    loader = {"batch_size": 3, "shuffle": False, "drop_last": False, "collate_fn": Pair}
    config.merge({"dataloader": loader, "optim": {"type": "sgd", "lr": 0.1}})
    with FittedPairs(config) as runner:
        runner.train()
        trained = runner.model.weight.detach()
        evaluated = runner.evaluate("val")["val"]["loss"]
    points = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    weight = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    (points @ weight.T - points.square().sum(1, keepdim=True)).square().mean().backward()
    assert weight.grad is not None
    torch.testing.assert_close(trained, -0.1 * weight.grad, rtol=1e-12, atol=0.0)
    loss = (points @ trained.T - points.square().sum(1, keepdim=True)).square().mean()
    assert evaluated == pytest.approx(float(loss), rel=1e-12)
