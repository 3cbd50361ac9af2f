"""Losses that a model computes itself, and batches without a target, without a runner."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from danling.data import Batch
from danling.training import BatchWeights, Window
from danling.training.batch_loss import BatchLoss

CPU = torch.device("cpu")


class Alone:
    """A domain of one rank."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def batch_loss(criterion: Any = None, targetless: bool | None = False, **options: Any) -> tuple[BatchLoss, Window]:
    window, weights = Window(Alone(), CPU), BatchWeights()
    weights.targetless = targetless
    run = SimpleNamespace(
        criterion=criterion,
        unwrapped_model=None,
        window=window,
        compute_loss=lambda pred, target: torch.tensor(7.0),
        batch_weight=lambda data, target: float((target[:, 1:] != -100).sum()),
    )
    loss = BatchLoss(
        run,
        weights=weights,
        glance=options.pop("glance", lambda: None),
        **options,
    )
    return loss, window


def shifted(labels: Tensor) -> dict[str, Tensor]:
    """Return the prediction of a model that compares each position with the next label."""
    torch.manual_seed(1)
    logits = torch.randn(*labels.shape, 5)
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


LABELS = torch.tensor([[1, 2, 3, 4], [4, 3, -100, 1]])


def test_the_first_batch_is_weighed_anew_by_what_its_loss_tells() -> None:
    loss, window = batch_loss()
    window.begin_microbatch(7.0, 2)  # as if each label counted
    pred = shifted(LABELS)
    assert loss.undecided and loss.of_model(pred, LABELS, training=True) is pred["loss"]
    assert not loss.undecided and loss.shift.answer == "shifted"
    assert window.current == window.weight == 5.0
    # In an evaluation the window is that of training.
    loss, window = batch_loss()
    window.begin_microbatch(7.0, 2)
    loss.of_model(pred, LABELS, training=False)
    assert loss.shift.answer == "shifted" and window.current == 7.0


def test_a_model_that_returns_no_loss_needs_a_criterion() -> None:
    loss, _ = batch_loss()
    with pytest.raises(ValueError, match=r"criterion=None and a prediction of type Tensor"):
        loss.of_model(torch.ones(2), None, training=True)


@pytest.mark.parametrize("own", ["own_loss", "own_weight"])
def test_nothing_is_looked_for_where_the_user_says_what_counts(own: str) -> None:
    loss, window = batch_loss(**{own: True})
    window.begin_microbatch(7.0, 2)
    loss.of_model(shifted(LABELS), LABELS, training=True)
    assert loss.shift.answer is None and not loss.undecided and window.current == 7.0


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
    loss, _ = batch_loss(criterion, targetless, own_loss=own_loss)
    found = loss.of_evaluated({"loss": torch.tensor(0.25)} if criterion is None else torch.ones(1), target)
    assert (None if found is None else float(found)) == expected


def test_the_data_to_train_on_is_glanced_at_only_where_no_batch_was_seen() -> None:
    glances: list[int] = []
    for targetless, number in ((None, 1), (True, 1)):
        loss, _ = batch_loss(nn.MSELoss(), targetless, glance=lambda: glances.append(1))
        loss.of_evaluated(torch.ones(1), None)
        assert len(glances) == number


def test_a_loss_that_is_seen_after_its_backward_is_complained_of_on_one_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "danling")
    for speaks in (True, False):
        loss, _ = batch_loss(speaks=speaks)
        loss.observe_returned((shifted(LABELS), None), LABELS)
        loss.observe_returned(None, LABELS)
        assert loss.shift.answer == "neither"
    assert len(caplog.records) == 1


def test_ranks_take_over_what_one_of_them_found_out() -> None:
    loss, _ = batch_loss()
    loss.agree(lambda mine: [mine, "shifted"])
    assert loss.shift.answer == "shifted"
    with_criterion, _ = batch_loss(nn.MSELoss())
    with_criterion.agree(lambda mine: pytest.fail("a criterion has nothing to agree on"))


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
