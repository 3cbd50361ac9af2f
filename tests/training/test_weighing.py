"""What a batch weighs, what is learnt of the batches to train on, and which batches have a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from danling.data import PLACEHOLDER, Batch
from danling.training.batches import BatchLoss, returned_loss


def batch_loss(*overridden: str, targetless: bool | None = None, **runner: Any) -> BatchLoss:
    """Return the weights of a run whose hooks of these names are the user's; a batch weighs as many as its target has."""
    given: dict[str, Any] = {
        "_overrides": lambda hook: hook in overridden,
        "_data": SimpleNamespace(settings=lambda split: {}),
        "is_main_process": True,
        "criterion": None,
        "device": torch.device("cpu"),
        "train_splits": [],
        "sources": {},
        "datasets": {},
        "batch_weight": lambda data, target: 10.0 if target is None else float(len(target)),
        "compute_loss": lambda pred, target: torch.tensor(7.0),
    }
    found = BatchLoss(SimpleNamespace(**{**given, **runner}))  # type: ignore[arg-type]
    found.targetless = targetless
    return found


PAIR = (torch.ones(3, 2), torch.ones(3))
BARE = Batch(PAIR[0], None, None)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Batch(PAIR, None, None), (3.0, 3)),
        (Batch(PAIR, 2, None), (3.0, 2)),  # the source knows better than the data
        (BARE, (10.0, 3)),
        (Batch(PAIR, 0, 0), (0.0, 0.0)),
        (Batch(PLACEHOLDER, 4, 8), (0.0, 0.0)),
    ],
    ids=["pair", "counted", "bare", "padding", "placeholder"],
)
def test_a_batch_is_weighed_and_counted(batch: Batch, expected: tuple[float, float]) -> None:
    assert batch_loss().weigh(batch, batch.data) == expected


def test_only_the_first_batch_to_train_on_tells_whether_there_are_targets() -> None:
    weights = batch_loss()
    for batch, training, expected in ((BARE, False, None), (Batch(PAIR, None, None), True, False), (BARE, True, False)):
        weights.weigh(batch, batch.data, training=training)
        assert weights.targetless is expected
    own = batch_loss("train_step")
    own.weigh(BARE, BARE.data, training=True)
    assert own.targetless is None


@pytest.mark.parametrize(
    ("criterion", "overridden", "warned"),
    [(nn.CrossEntropyLoss(), (), 1), (nn.CrossEntropyLoss(), ("batch_weight",), 0), (nn.MSELoss(), (), 0)],
)
def test_a_criterion_that_ignores_targets_is_warned_of_once_if_none_is_found(
    criterion: nn.Module, overridden: tuple[str, ...], warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights = batch_loss(*overridden, criterion=criterion)
    for _ in range(2):
        weights.weigh(BARE, BARE.data, training=True)
    assert len(caplog.records) == warned


def test_a_model_that_returns_no_loss_needs_a_criterion() -> None:
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
def test_which_evaluated_batches_have_a_loss(
    criterion: Any, targetless: bool | None, overridden: tuple[str, ...], target: Any, expected: float | None
) -> None:
    loss = batch_loss(*overridden, targetless=targetless, criterion=criterion)
    found = loss.of_evaluated({"loss": torch.tensor(0.25)} if criterion is None else torch.ones(1), target)
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
        _data=SimpleNamespace(settings=lambda split: options),
    )
    torch.manual_seed(3)
    expected_draw = torch.rand(2)
    torch.manual_seed(3)
    weights.of_evaluated(torch.ones(1), None)
    assert weights.targetless is expected and torch.equal(torch.rand(2), expected_draw)
