"""Optimizers with two sets of weights, by a small one of this file."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from danling.optim.state import evaluation_weights, training_weights


class Doubled(torch.optim.SGD):
    trains = True

    def train(self) -> None:
        self._scale(0.5, True)

    def eval(self) -> None:
        self._scale(2.0, False)

    @torch.no_grad()
    def _scale(self, factor: float, trains: bool) -> None:
        if trains is not self.trains:
            self.trains = trains
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(factor)


def made(value: float = 3.0) -> tuple[Doubled, nn.Parameter]:
    weight = nn.Parameter(torch.tensor([value, 1.0]))
    optimizer = Doubled([weight], lr=0.1)
    optimizer.state[weight]["seen"] = 1
    return optimizer, weight


def values(weight: Tensor) -> list[float]:
    return [float(value) for value in weight.detach()]


def test_evaluation_weights_set_by_the_program_or_a_context_stay() -> None:
    optimizer, weight = made()
    with evaluation_weights(optimizer):
        with evaluation_weights(optimizer):
            assert values(weight) == [6.0, 2.0]
        assert (
            values(weight) == [6.0, 2.0]
            and not optimizer.trains
            and not training_weights(optimizer)
        )
    assert (
        values(weight) == [3.0, 1.0] and optimizer.trains and len(training_weights(optimizer)) == 1
    )
    optimizer.eval()
    with evaluation_weights(optimizer):
        assert values(weight) == [6.0, 2.0]
    assert values(weight) == [6.0, 2.0] and not optimizer.trains


def test_nonfinite_weights_are_distinguished() -> None:
    optimizer, weight = made(float("nan"))
    with evaluation_weights(optimizer):
        assert values(weight)[1] == 2.0
    assert optimizer.trains and values(weight)[1] == 1.0
