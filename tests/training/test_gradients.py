"""Norm and clipping are torch's: bit for bit where all gradients are of one dtype."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from danling.training.reduction import GradientReduction, clip_coefficient

KINDS = {
    "one": (torch.float32,) * 4,
    "float64": (torch.float64,) * 3,
    "mixed": (torch.float32, torch.float64, torch.float32, torch.bfloat16),
}


def parameters(kinds: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    made = [nn.Parameter(torch.zeros(5 * place + 1, 3, dtype=kind)) for place, kind in enumerate(kinds)]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return [*made, nn.Parameter(torch.zeros(2))]  # the last one has no gradient


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("share", [0.1, 0.9999, 1.0, 1.0001, 10.0])
def test_clipped_as_torch_clips(kinds: tuple[torch.dtype, ...], share: float) -> None:
    own = parameters(kinds)
    theirs = copy.deepcopy(own)
    for mine, other in zip(own, theirs):
        other.grad = None if mine.grad is None else mine.grad.clone()
    runner = SimpleNamespace(optimizer=torch.optim.SGD(own), precision=SimpleNamespace(scaler=None))
    runner.named_parameters = list
    reduction = GradientReduction(cast(Any, runner))
    norm = reduction.norm(reduction.held())
    assert torch.equal(norm, nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None]))
    max_norm = share * norm.item()
    reduction.clip(norm, max_norm, None)
    nn.utils.clip_grad_norm_(theirs, max_norm)
    for mine, other in zip(reduction.held(), (p.grad for p in theirs if p.grad is not None)):
        # To a gradient of lower precision torch rounds the factor first.
        assert torch.equal(mine, other) if len(set(kinds)) == 1 else torch.allclose(mine, other, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_coefficient_is_bit_for_bit_that_of_tensor_operations(dtype: torch.dtype) -> None:
    numbers = random.Random(3)
    for _ in range(5000):
        value = numbers.choice(
            [numbers.uniform(0, 3), numbers.uniform(0.99, 1.01), 10 ** numbers.uniform(-40, 38), 0.0]
        )
        max_norm = numbers.choice([1, 1.0, numbers.uniform(0, 5), 10 ** numbers.uniform(-12, 38), 1e40])
        norm = torch.tensor(value, dtype=dtype)
        coefficient, plain = clip_coefficient(max_norm, norm), torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        assert coefficient.dtype == plain.dtype and torch.equal(coefficient, plain), (value, max_norm)


def test_the_coefficient_is_of_the_norms_kind_whatever_torch_makes_by_default() -> None:
    norm = torch.tensor(2.0)
    with torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        try:
            coefficient = clip_coefficient(1.0, norm)
        finally:
            torch.set_default_dtype(torch.float32)
    assert coefficient.dtype == torch.float32 and coefficient.device.type == "cpu"
