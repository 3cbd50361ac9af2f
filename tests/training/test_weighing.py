"""What a batch weighs, and what is learnt of the batches to train on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from danling.data import PLACEHOLDER, Batch
from danling.training import BatchWeights

CPU = torch.device("cpu")
PAIR = (torch.ones(3, 2), torch.ones(3))


def own_weight(data: Any, target: Any) -> float:
    return 10.0 if target is None else 20.0


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Batch(PAIR, None, None), (20.0, 3)),
        (Batch(PAIR, 2, None), (20.0, 2)),  # the source knows better than the data
        (Batch(PAIR[0], None, None), (10.0, 3)),
        (Batch(PAIR, 0, 0), (0.0, 0.0)),
        (Batch(PLACEHOLDER, 4, 8), (0.0, 0.0)),
    ],
    ids=["pair", "counted", "bare", "padding", "placeholder"],
)
def test_a_batch_is_weighed_and_counted(batch: Batch, expected: tuple[float, float]) -> None:
    assert BatchWeights().weigh(batch, batch.data, own_weight) == expected


def test_only_batches_to_train_on_tell_whether_there_are_targets() -> None:
    weights = BatchWeights()
    weights.weigh(Batch(PAIR[0], None, None), PAIR[0], own_weight)
    assert weights.targetless is None
    weights.weigh(Batch(PAIR, None, None), PAIR, own_weight, training=True)
    assert weights.targetless is False
    weights.weigh(Batch(PAIR[0], None, None), PAIR[0], own_weight, training=True)
    assert weights.targetless is False  # the first one tells
    own = BatchWeights(learns=False)
    own.weigh(Batch(PAIR, None, None), PAIR, own_weight, training=True)
    own.look_at([PAIR], CPU)
    assert own.targetless is None


class Drawing:
    """A dataset that draws, and another one that has no first sample."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __getitem__(self, index: int) -> Any:
        torch.rand(1)
        return self.sample[index]


@pytest.mark.parametrize(("sample", "expected"), [([PAIR], False), ([PAIR[0]], True), ([], None)])
def test_a_dataset_is_looked_at_without_moving_the_streams(sample: Any, expected: bool | None) -> None:
    weights = BatchWeights()
    torch.manual_seed(3)
    expected_draw = torch.rand(2)
    torch.manual_seed(3)
    weights.look_at(Drawing(sample), CPU)
    assert weights.targetless is expected and torch.equal(torch.rand(2), expected_draw)


@pytest.mark.parametrize("warns", [True, False])
def test_a_criterion_that_ignores_targets_nobody_finds_is_warned_of_once(
    warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    criterion: list[nn.Module] = [nn.CrossEntropyLoss()]
    weights = BatchWeights(warns=warns, criterion=lambda: criterion[0])
    for _ in range(2):
        weights.weigh(Batch(PAIR[0], None, None), PAIR[0], own_weight, training=True)
    assert len(caplog.records) == warns
    weights = BatchWeights(criterion=lambda: criterion[0])
    criterion[0] = nn.MSELoss()
    weights.weigh(Batch(PAIR[0], None, None), PAIR[0], own_weight, training=True)
    criterion[0] = nn.CrossEntropyLoss()
    weights.weigh(Batch(PAIR, None, None), PAIR, own_weight, training=True)
    assert len(caplog.records) == warns
