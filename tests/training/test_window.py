"""The accumulation window without a runner: what its factors make of gradients is the mean over all that was counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danling.distributed import LocalDomain
from danling.training import Window

HOST = torch.device("cpu")


def test_one_full_micro_batch_is_a_plain_backward() -> None:
    window, loss = Window(LocalDomain(), HOST), torch.tensor(0.3, requires_grad=True)
    window.begin_microbatch(8.0, 8.0)
    assert window.scale(loss) is loss and window.gradient_factor(8.0, 1) == 1.0


def test_a_loss_that_never_came_is_counted_unless_none_is_expected() -> None:
    window = Window(LocalDomain(), HOST)
    window.begin_microbatch(2.0, 2.0)
    window.begin_microbatch(0.0, 0.0)  # padding has no loss
    window.begin_microbatch(2.0, 2.0)
    window.expect_no_loss()
    window.end_microbatch()
    assert window.unscaled == 1


def test_what_is_not_finite_is_seen_where_it_weighs_something() -> None:
    window = Window(LocalDomain(), HOST)
    window.begin_microbatch(0.0, 1.0)
    window.scale(torch.tensor(float("nan")))
    assert not window.nonfinite
    window.begin_microbatch(1.0, 1.0)
    window.scale(torch.tensor(float("inf")))
    assert window.nonfinite == 1.0


def test_sums_are_added_and_padding_adds_nothing() -> None:
    window = Window(LocalDomain(), HOST)
    window.sum_reduced = True
    window.begin_microbatch(3.0, 3.0)
    assert window.scale(torch.tensor(6.0)) == 6.0
    window.begin_microbatch(0.0, 0.0)
    assert window.scale(torch.tensor(9.0)) == 0.0
    assert window.loss == 6.0 and window.gradient_factor(3.0, 4) == 4.0


@pytest.mark.parametrize("loss", [torch.ones(2), 0.5])
def test_a_loss_of_several_values_is_refused(loss: Tensor) -> None:
    window = Window(LocalDomain(), HOST)
    window.begin_microbatch(2.0, 2.0)
    with pytest.raises(ValueError, match="Expected a loss of one value"):
        window.scale(loss)


def test_an_update_of_no_micro_batch_or_of_unscaled_losses_is_refused() -> None:
    window = Window(LocalDomain(), HOST)
    with pytest.raises(ValueError, match="need at least one train_step"):
        window.check_open()
    for _ in range(3):
        window.begin_microbatch(2.0, 2.0)
    window.check_open()
    window.scale(torch.ones(()))
    window.end_microbatch()
    with pytest.raises(ValueError, match="Received: 2 of 3 without"):
        window.check_scaled()
    window.reset()
    window.begin_microbatch(0.0, 0.0)  # padding has no loss
    window.end_microbatch()
    window.check_scaled()
