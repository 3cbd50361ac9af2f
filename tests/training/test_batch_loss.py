"""Losses that a model computes itself, and batches without a target, without a runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from danling.data import Batch
from danling.training import BatchWeights
from danling.training.batch_loss import BatchLoss

CPU = torch.device("cpu")


def batch_loss(criterion: Any = None, targetless: bool | None = False, **options: Any) -> BatchLoss:
    weights = BatchWeights()
    weights.targetless = targetless
    run: Any = SimpleNamespace(criterion=criterion, compute_loss=lambda pred, target: torch.tensor(7.0))
    return BatchLoss(run, weights=weights, glance=options.pop("glance", lambda: None), **options)


def test_a_model_that_returns_no_loss_needs_a_criterion() -> None:
    loss = batch_loss()
    with pytest.raises(ValueError, match=r"criterion=None and a prediction of type Tensor"):
        loss.of_model(torch.ones(2))


@pytest.mark.parametrize(
    ("criterion", "targetless", "own_loss", "target", "expected"),
    [
        (nn.MSELoss(), False, False, 1, 7.0),
        (nn.MSELoss(), False, False, None, None),  # training compares with a target, which is missing
        (nn.MSELoss(), True, False, None, 7.0),  # an autoencoder
        (nn.MSELoss(), None, False, None, None),  # nobody can tell
        (None, False, True, None, 0.25),
        (None, None, True, None, 7.0),
        (None, False, False, 1, 0.25),  # that of the model
    ],
)
def test_which_evaluated_batches_have_a_loss(
    criterion: Any, targetless: bool | None, own_loss: bool, target: Any, expected: float | None
) -> None:
    loss = batch_loss(criterion, targetless, own_loss=own_loss)
    found = loss.of_evaluated({"loss": torch.tensor(0.25)} if criterion is None else torch.ones(1), target)
    assert (None if found is None else float(found)) == expected


def test_the_data_to_train_on_is_glanced_at_only_where_no_batch_was_seen() -> None:
    glances: list[int] = []
    for targetless, number in ((None, 1), (True, 1)):
        loss = batch_loss(nn.MSELoss(), targetless, glance=lambda: glances.append(1))
        loss.of_evaluated(torch.ones(1), None)
        assert len(glances) == number


def test_a_target_is_looked_for_in_the_first_split_whose_samples_are_those_of_its_batches() -> None:
    settings: dict[str, Any] = {}
    positions, stream = SimpleNamespace(kind="position"), SimpleNamespace(kind="stream")
    for sources, options, expected in (
        ({"train": positions}, {}, True),
        ({"train": positions}, {"num_workers": 2}, None),
        ({"train": positions}, {"collate_fn": list}, None),
        ({"train": stream}, {}, None),
        ({}, {}, None),
    ):
        weights, settings = BatchWeights(), options
        weights.look_at_first(
            ["other", "train"],
            sources=sources,  # type: ignore[arg-type]
            datasets={"train": [torch.ones(2)], "val": [(torch.ones(2), 1)]},
            settings=lambda split: settings,  # noqa: B023
            device=CPU,
        )
        assert weights.targetless is expected
    assert weights.weigh(Batch(torch.ones(3, 2), None, None), torch.ones(3, 2), lambda data, target: 2.0) == (2.0, 3)
