"""What is refused of what a user put on a runner, without a runner."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from danling.optim import JointOptimizer
from danling.training.component_checks import refuse_early_steps


@pytest.mark.parametrize("several", [False, True])
def test_a_step_of_the_optimizer_is_refused_within_a_train_step_alone(several: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    session = SimpleNamespace(in_step=False)
    refuse_early_steps(JointOptimizer(optimizer) if several else optimizer, lambda: session.in_step)
    optimizer.step()
    session.in_step = True
    with pytest.raises(RuntimeError, match="a step of SGD inside of it"):
        optimizer.step()
