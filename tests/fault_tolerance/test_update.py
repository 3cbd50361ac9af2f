"""An update around which replica groups agree, without a runner: the other groups are told what to answer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling.distributed import LocalDomain, StepTotals
from danling.torchft import QuorumError, ReplicatedUpdate
from danling.torchft.healing import laid_out_like, packed, sharded_optimizer_state
from danling.training import LocalReduction, Window


class Groups:
    """A group beside another one, which has made `theirs` of the same update."""

    def __init__(self, theirs: Sequence[Tensor | None] = (), totals: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        self.theirs = list(theirs)
        self.totals = list(totals)
        self.failures = 0
        self.step = 0
        self.answers: list[bool] = []
        self.heals = False
        self.lost = False

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": 2 * self.step}

    def open(self) -> bool:
        return self.heals

    def all_reduce(self, tensor: Tensor) -> Tensor:
        present = [float(gradient is not None) for gradient in self.theirs]
        return tensor.add_(torch.tensor([*self.totals, *present], dtype=tensor.dtype))

    def reduce_gradients(
        self, parameters: Sequence[nn.Parameter], present: Sequence[bool], factor: float | Tensor = 1.0
    ) -> None:
        for parameter, there, other in zip(parameters, present, self.theirs, strict=True):
            if there:
                mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * factor
                parameter.grad = mine + (0 if other is None else other)

    def average(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.div_(2)

    def commit(self) -> bool:
        if self.lost:
            raise QuorumError("lost")
        committed = self.answers.pop(0) if self.answers else True
        self.failures = 0 if committed else self.failures + 1
        self.step += committed
        return committed


def update_of(groups: Groups, taken_back: list[int] | None = None, **more: Any) -> ReplicatedUpdate:
    def remember() -> Callable[[], None]:
        return lambda: None if taken_back is None else taken_back.append(groups.step)

    given: dict[str, Any] = {"statistics": list, "begin_alike": lambda healed: healed, "catch_up": lambda: False}
    return ReplicatedUpdate(groups, remember=remember, **{**given, **more})


def test_two_groups_make_the_update_of_all_their_samples() -> None:
    """One group has 3 samples, the other 5; together they make the mean over 8."""
    net = nn.Linear(4, 2)
    other, whole = copy.deepcopy(net), copy.deepcopy(net)
    mine, theirs = torch.randn(3, 4), torch.randn(5, 4)
    (other(theirs).square().mean() * 5).backward()  # what that group sends: the weighted sum
    groups = Groups([p.grad for p in other.parameters()], (5.0, other(theirs).square().mean().item() * 5, 5.0, 0.0))
    reduction = update_of(groups).around(
        LocalReduction(torch.optim.SGD(net.parameters(), lr=0.1), lambda: net.named_parameters())
    )
    window = Window(LocalDomain(), torch.device("cpu"))
    window.begin_microbatch(3.0, 3.0)
    reduction.backward(window.scale(net(mine).square().mean()), last=True)
    mine_alone = StepTotals(window.weight, window.loss, window.samples, window.nonfinite, frozenset({"save"}))
    totals = reduction.agree(mine_alone, window, 1)
    assert totals is not None and (totals.weight, totals.samples, totals.requests) == (8.0, 8.0, frozenset({"save"}))
    norm = reduction.norm(reduction.unscale(1 / 8, totals.weight))
    whole_loss = whole(torch.cat([mine, theirs])).square().mean()
    whole_loss.backward()
    assert float(totals.loss) / 8 == pytest.approx(whole_loss.item())
    assert torch.allclose(norm, nn.utils.get_total_norm([p.grad for p in whole.parameters()]))  # type: ignore[misc]
    for own, expected in zip(net.parameters(), whole.parameters(), strict=True):
        assert own.grad is not None and expected.grad is not None
        assert torch.allclose(own.grad, expected.grad)


def test_a_sum_is_not_divided_by_the_weight() -> None:
    net = nn.Linear(2, 1, bias=False)
    reduction = update_of(Groups([torch.ones(1, 2)], (1.0, 1.0, 1.0, 0.0))).around(
        LocalReduction(torch.optim.SGD(net.parameters(), lr=0.1), lambda: net.named_parameters())
    )
    window = Window(LocalDomain(), torch.device("cpu"))
    window.sum_reduced = True
    window.begin_microbatch(2.0, 2.0)
    reduction.backward(window.scale(net(torch.ones(2, 2)).sum()), last=True)
    totals = reduction.agree(StepTotals(2.0, window.loss, 2.0, 0.0), window, 1)
    assert totals is not None and reduction.unscale(1.0, totals.weight)[0].tolist() == [[3.0, 3.0]]


def test_a_refused_update_is_taken_back_and_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    groups, taken_back = Groups(), list[int]()
    groups.answers = [False, True]
    update = update_of(groups, taken_back)
    assert not update.open() and update.is_open
    assert not update.commit(1) and not update.is_open and taken_back == [0]
    assert "did not commit update 1 (failure 1)" in caplog.text
    update.open()
    assert update.commit(1) and taken_back == [0]


def test_what_cannot_be_agreed_on_is_taken_back_before_the_error() -> None:
    groups, taken_back = Groups(), list[int]()
    groups.lost = True
    update = update_of(groups, taken_back)
    update.open()
    with pytest.raises(QuorumError):
        update.commit(1)
    assert taken_back == [0] and not update.is_open


def test_an_update_is_opened_once_and_a_state_that_was_replaced_is_told() -> None:
    groups, joined = Groups(), list[bool]()
    groups.heals = True
    update = update_of(groups, begin_alike=lambda healed: joined.append(healed) or healed, catch_up=lambda: False)
    assert update.open() and joined == [True]
    assert not update.open()  # it is open
    update.commit(1)
    groups.heals = False
    assert not update.open() and joined == [True]  # ranks begin alike at step 0 only


def test_a_group_that_joins_goes_on_from_a_newer_checkpoint_once() -> None:
    update = update_of(Groups(), catch_up=lambda: True)
    assert update.open()
    update.commit(1)
    assert not update.open()


def test_the_state_that_is_sent_is_not_changed_by_a_forward() -> None:
    weight, statistic = torch.ones(2), torch.zeros(2)
    sent = packed({"model": {"weight": weight, "mean": statistic}, "step": 3}, [statistic])
    statistic.add_(1)
    assert sent["model"]["mean"].tolist() == [0, 0] and sent["step"] == 3
    assert sent["model"]["weight"].data_ptr() == weight.data_ptr()
    assert torch.equal(laid_out_like(sent["model"], {"weight": weight})["weight"], weight)
    moments = {"state": {"weight": {"exp_avg": torch.ones(2), "step": 1}}, "param_groups": []}
    laid_out = sharded_optimizer_state(moments, {"weight": nn.Parameter(weight)})
    assert laid_out["state"]["weight"]["exp_avg"] is moments["state"]["weight"]["exp_avg"]  # type: ignore[call-overload]
