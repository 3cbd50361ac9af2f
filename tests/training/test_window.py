"""The accumulation window without a runner: what its factors make of gradients is the mean over all that was counted."""

from __future__ import annotations

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn

from danling.distributed import Domain, LocalDomain, StepSync
from danling.training import Window

HOST = torch.device("cpu")


def test_unequal_micro_batches_make_the_mean_over_all_targets() -> None:
    window, net = Window(LocalDomain(), HOST), nn.Linear(3, 1)
    inputs = torch.randn(10, 3)
    for part in inputs.split([5, 1, 4]):
        window.begin_microbatch(float(len(part)), len(part))
        window.scale(net(part).square().mean()).backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad * window.gradient_factor(window.weight, 1) for parameter in net.parameters()]  # type: ignore[operator]
    loss = net(inputs).square().mean()
    expected = torch.autograd.grad(loss, list(net.parameters()))
    assert all(torch.allclose(mine, whole) for mine, whole in zip(found, expected, strict=True))
    assert window.loss / window.weight == pytest.approx(loss.item())
    assert (window.count, window.weight, window.samples, window.unscaled) == (3, 10.0, 10.0, 0)
    window.reset()
    assert (window.count, window.weight, window.loss, window.samples) == (0, 0.0, 0.0, 0.0)


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


def rank_of_window() -> tuple[float, float, float, frozenset[str]]:
    """Weigh a micro-batch of 1 or 3 targets, and return its gradient as the mean over both ranks."""
    domain = Domain()
    window, sync = Window(domain, HOST), StepSync(domain, HOST, reports=(True, domain.rank == 0))
    weight = torch.ones((), requires_grad=True)
    size = 1.0 + 2.0 * domain.rank
    window.begin_microbatch(size, size)
    window.scale(weight * (domain.rank + 1.0)).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    gradient = domain.all_reduce(weight.grad.clone())
    totals = sync.reduce(
        weight=window.weight,
        loss=window.loss,
        samples=window.samples,
        nonfinite=0.0,
        requests={"save"} if size > 1 else (),
    )
    mean = gradient * window.gradient_factor(totals.weight, 1)
    return mean.item(), float(totals.weight), float(totals.samples), totals.requests


def test_ranks_agree_on_weight_and_requests() -> None:
    ranks = run_processes(rank_of_window, world_size=2, init_process_group=True)
    mean, weight, samples, requests = ranks[0]
    assert ranks[0] == ranks[1] and mean == pytest.approx((1 * 1.0 + 3 * 2.0) / 4)
    # Of ranks that work on one batch together, one counts its samples.
    assert (weight, samples, requests) == (4.0, 1.0, frozenset({"save"}))


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
