"""Mistakes of the first days: each is answered before the first update, or is named in it, with the cause and the mend."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import danling as dl

INPUTS = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) > 0).long()
DATA = TensorDataset(INPUTS, TARGETS)


class Toy(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.datasets = {"train": DATA}
        self.model = nn.Linear(4, 2)
        self.criterion = nn.CrossEntropyLoss()
        self.more()

    def more(self) -> None:
        """Make the mistake."""


def settings(**more: Any) -> dl.RunnerConfig:
    base = {
        "epochs": 1,
        "seed": 1,
        "log": False,
        "dataloader": {"batch_size": 4},
        "optim": {"type": "sgd", "lr": 0.1},
    }
    return dl.RunnerConfig({**base, **more})


def train(config: Any = None, **methods: Any) -> int:
    """Train, and return the number of updates."""
    kind: Any = type("Toy", (Toy,), methods)
    with kind(settings() if config is None else config) as runner:
        runner.train()
        return int(runner.train_state.global_step)


# Data


def test_dataset_in_the_place_of_a_loader_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"loader of batches in self.dataloaders\['train'\]. Received: a TensorDataset.*self.datasets",
    ):
        train(more=lambda self: self.dataloaders.update(train=DATA))


def test_dataset_of_batches_goes_through_a_loader_without_a_batch_size() -> None:
    batches = [(INPUTS[:4], TARGETS[:4]), (INPUTS[4:8], TARGETS[4:8])]

    class Batches(Dataset[Any]):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    updates = train(
        more=lambda self: self.dataloaders.update(train=DataLoader(Batches(), batch_size=None))
    )
    assert updates == len(batches)


@pytest.mark.parametrize(
    "columns", [(INPUTS, TARGETS), (INPUTS.numpy(), TARGETS.numpy()), (INPUTS[:, 0], TARGETS)]
)
def test_columns_in_a_tuple_are_no_dataset(columns: Any) -> None:
    with pytest.raises(
        ValueError, match="tuple of 2 tensors or arrays of 16 rows each.*TensorDataset"
    ):
        train(more=lambda self: self.datasets.update(train=columns))


def test_samples_in_a_tuple_are_a_dataset() -> None:
    samples = tuple(torch.randn(4) for _ in range(8))
    updates = train(
        more=lambda self: self.datasets.update(train=samples),
        compute_loss=lambda self, pred, target: pred.square().mean(),
    )
    assert updates == len(samples) // 4


def test_loader_in_the_place_of_a_split_is_not_read() -> None:
    read: list[int] = []

    class Counting(Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return DATA[index]

    with Toy(settings()) as runner:
        with pytest.raises(
            TypeError, match=r"name of a split, one of \['train'\]. Received: a DataLoader."
        ):
            runner.evaluate(DataLoader(Counting(), batch_size=4))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="name of a split.*Received: a TensorDataset"):
            runner.evaluate_epoch(DATA)  # type: ignore[arg-type]
    assert read == []


# Parts of the runner


class ListedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def projected(self: Any, pred: Any, target: Any) -> Any:
    return self.criterion(self.projector(pred), target)


@pytest.mark.parametrize(
    ("more", "methods", "named"),
    [
        (
            lambda self: setattr(self, "model", ListedLayers()),
            {},
            "model.layers[0].weight, model.layers[0].bias, model.layers[1].weight",
        ),
        (
            lambda self: setattr(self, "projector", nn.Linear(2, 2)),
            {"compute_loss": projected},
            "self.projector.weight, self.projector.bias",
        ),
        (
            lambda self: setattr(self, "scale", nn.Parameter(torch.ones(()))),
            {"compute_loss": lambda self, pred, target: self.criterion(pred * self.scale, target)},
            "self.scale",
        ),
    ],
    ids=["list of layers", "module", "parameter"],
)
def test_parameters_without_an_optimizer_are_named_once(
    more: Any, methods: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(more=more, **methods)
    assert [
        record.message
        for record in caplog.records
        if f"Received: a gradient for {named}" in record.message
    ]
    assert caplog.text.count("every parameter that the loss depends on") == 1


def frozen_teacher(self: Any) -> None:
    self.teacher = nn.Linear(4, 2).requires_grad_(False)
    self.twin = self.model  # another name of the model


def unused_teacher(self: Any) -> None:
    self.teacher = nn.Linear(4, 2)


def own_optimizer(self: Any) -> None:
    self.projector = nn.Linear(2, 2)
    self.helpers = {"projector": torch.optim.SGD(self.projector.parameters(), lr=0.1)}


@pytest.mark.parametrize(
    ("more", "methods"),
    [(frozen_teacher, {}), (unused_teacher, {}), (own_optimizer, {"compute_loss": projected})],
)
def test_untrained_parameters_and_those_of_an_optimizer_are_not_named(
    more: Any, methods: Any, caplog: pytest.LogCaptureFixture
) -> None:
    train(more=more, **methods)
    assert "every parameter that the loss depends on" not in caplog.text


def test_copy_of_the_model_is_no_average() -> None:
    with pytest.raises(
        ValueError,
        match="`self.ema` to be averages.*Received: ema of type Linear. Set ema.enabled=true",
    ):
        train(more=lambda self: setattr(self, "ema", nn.Linear(4, 2)))


def test_value_in_the_place_of_a_method_is_refused_after_construction() -> None:
    def stopping(self: Any, data: Any) -> Any:
        self.stop = True
        return Toy.train_step(self, data)

    with pytest.raises(
        AttributeError,
        match=r"Received: self.stop = True.*To call the method, write self.stop\(...\)",
    ):
        train(train_step=stopping)


def test_function_in_the_place_of_a_method_may_be_set() -> None:
    with Toy(settings()) as runner:
        stopped: list[int] = []
        runner.stop = lambda: stopped.append(1)  # type: ignore[method-assign]
        runner.stop()
    assert stopped == [1]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("log", "self.log_metric(name, value)"),
        ("current_epoch", "self.train_state.epoch"),
        ("fit", "runner.train()"),
    ],
)
def test_attribute_of_another_trainer_is_answered_with_ours(name: str, answer: str) -> None:
    with Toy(settings()) as runner:
        with pytest.raises(AttributeError) as failed:
            getattr(runner, name)
        assert f"use {answer} here" in str(failed.value)
        assert not hasattr(runner, name) and getattr(runner, name, None) is None


def test_failing_property_is_not_reported_as_missing() -> None:
    class Own(Toy):
        @property
        def figure(self) -> int:
            return self.model.widht  # type: ignore[no-any-return]

    with (
        Own(settings()) as runner,
        pytest.raises(AttributeError, match="'Linear' object has no attribute 'widht'"),
    ):
        runner.figure  # noqa: B018


# Settings


@pytest.mark.parametrize("name", ["width", "net"])
def test_missing_key_of_the_argument_is_an_error_within_init(name: str) -> None:
    config = settings()
    with pytest.raises(AttributeError, match=f"no key '{name}'"):
        train(config, more=lambda self: getattr(config, name))
    config.net.width = 3  # afterwards a section is made by assignment again
    assert config.net.width == 3


def test_missing_key_of_the_argument_is_made_again_after_construction() -> None:
    config = settings()
    with Toy(config):
        config.model.head.width = 4
    assert config.model.head.width == 4


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_runner_is_refused_with_what_to_copy(copied: Any) -> None:
    with (
        Toy(settings()) as runner,
        pytest.raises(TypeError, match=r"stay in its process.*Its model is self.unwrapped_model"),
    ):
        copied(runner)


@pytest.mark.parametrize(
    ("name", "answer"), [("save", "runner.save_checkpoint()"), ("eval", "runner.evaluate(split)")]
)
def test_a_method_of_another_trainer_that_is_read_is_answered(name: str, answer: str) -> None:
    with Toy(settings()) as runner, pytest.raises(AttributeError) as caught:
        getattr(runner, name)
    assert f"Other trainers have it; use {answer}" in str(caught.value)
