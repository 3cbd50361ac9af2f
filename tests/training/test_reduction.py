"""What completes, measures, clips and applies a gradient, without a runner: beside torch's own calls on whole tensors."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danling.training import GradientReduction
from danling.training.canonical_sum import order_free_norm
from danling.training.reduction import clip_coefficient


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(rank: int = 0, samples: int = 5) -> Tensor:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(10 + rank))


def reduction_of(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None
) -> GradientReduction:
    runner: Any = SimpleNamespace(optimizer=optimizer, precision=SimpleNamespace(scaler=scaler))
    runner.named_parameters = net.named_parameters
    return GradientReduction(runner)


@pytest.mark.parametrize("max_norm,max_value", [(None, None), (None, 0.02), (0.1, 0.02)])
def test_update_equals_torch(max_norm: float | None, max_value: float | None) -> None:
    net = model()
    other = copy.deepcopy(net)
    reduction = reduction_of(net, torch.optim.SGD(net.parameters(), lr=0.1))
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        reduction.backward(net(batch()).square().sum(), last=True)
        reduction.complete()
        norm = reduction.norm(reduction.unscale(0.25, 4.0))
        reduction.clip(norm, max_norm, max_value)
        reduction.apply()
        reduction.zero()
        (other(batch()).square().sum() * 0.25).backward()
        assert torch.allclose(norm, nn.utils.get_total_norm([p.grad for p in other.parameters()]))  # type: ignore[misc]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(other.parameters(), max_norm)
        if max_value is not None:
            nn.utils.clip_grad_value_(other.parameters(), max_value)
        theirs.step()
        theirs.zero_grad()
    assert all(torch.allclose(mine, his) for mine, his in zip(net.parameters(), other.parameters()))
    assert all(parameter.grad is None for parameter in net.parameters())


def test_added_group_is_updated_and_unused_gradients_do_not_accumulate() -> None:
    net, late = model(), nn.Parameter(torch.ones(2))
    reduction = reduction_of(net, torch.optim.SGD(net[0].parameters(), lr=0.1))  # type: ignore[index]
    assert len(reduction.parameters) == 2
    net(batch()).sum().backward()
    reduction.zero()
    assert all(parameter.grad is None for parameter in net.parameters())
    reduction.optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(2)
    assert (
        reduction.parameters[-1] is late
        and reduction.norm(reduction.unscale(1.0, 1.0)) == torch.tensor(2.0).sqrt()
    )


def test_an_optimizer_of_the_users_own_zeroes_as_it_does() -> None:
    class Counting(torch.optim.SGD):
        zeroed = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            Counting.zeroed += 1
            super().zero_grad(set_to_none)

    net = model()
    reduction_of(net, Counting(net.parameters(), lr=0.1)).zero()
    assert Counting.zeroed == 1


def test_the_scale_of_float16_is_taken_out_and_an_overflow_halves_it() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = nn.Linear(2, 1, bias=False)
    weights = net.weight.detach().clone()
    reduction = reduction_of(net, torch.optim.SGD(net.parameters(), lr=1.0), scaler)
    reduction.backward(scaler.scale(net(torch.ones(1, 2)).sum()), last=True)
    assert reduction.unscale(1.0, 1.0)[0].tolist() == [[1.0, 1.0]]
    reduction.apply()
    scaler.update()
    assert torch.equal(net.weight, weights - 1.0)
    reduction.zero()
    reduction.backward(scaler.scale(net(torch.full((1, 2), torch.inf)).sum()), last=True)
    # The update leaves such a gradient out; the scaler has seen it.
    assert not reduction.norm(reduction.unscale(1.0, 1.0)).isfinite()
    scaler.update()
    assert scaler.get_scale() == 512.0
    reduction.zero()
    reduction.backward(scaler.scale(net(torch.ones(1, 2)).sum()), last=True)
    assert reduction.unscale(1.0, 1.0)[0].tolist() == [[1.0, 1.0]]
    # A window of padding has no gradient, and the next one can be unscaled.
    scaler.update()
    reduction.zero()
    assert reduction.unscale(0.0, 0.0) == []


def test_scaled_gradient_is_stepped_through_the_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    net = nn.Linear(2, 1, bias=False)
    reduction = reduction_of(net, torch.optim.SGD(net.parameters(), lr=1.0), scaler)
    for value, moved in ((1.0, 1.0), (torch.inf, 0.0)):
        before = net.weight.detach().clone()
        reduction.backward(scaler.scale(net(torch.full((1, 2), value)).sum()), last=True)
        reduction.apply()
        scaler.update()
        reduction.zero()
        assert torch.equal(net.weight, before - moved)


# Norm and clipping are torch's: bit for bit where all gradients are of one dtype

KINDS = {
    "one": (torch.float32,) * 4,
    "float64": (torch.float64,) * 3,
    "mixed": (torch.float32, torch.float64, torch.float32, torch.bfloat16),
}


def parameters(kinds: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    made = [
        nn.Parameter(torch.zeros(5 * place + 1, 3, dtype=kind)) for place, kind in enumerate(kinds)
    ]
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
    reduction = reduction_of(nn.Module(), torch.optim.SGD(own))
    norm = reduction.norm(reduction.held())
    assert torch.equal(
        norm, nn.utils.get_total_norm([p.grad for p in theirs if p.grad is not None])
    )
    max_norm = share * norm.item()
    reduction.clip(norm, max_norm, None)
    nn.utils.clip_grad_norm_(theirs, max_norm)
    for mine, other in zip(reduction.held(), (p.grad for p in theirs if p.grad is not None)):
        # To a gradient of lower precision torch rounds the factor first.
        assert (
            torch.equal(mine, other)
            if len(set(kinds)) == 1
            else torch.allclose(mine, other, rtol=1e-2)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_coefficient_equals_tensor_operations_bitwise(dtype: torch.dtype) -> None:
    numbers = random.Random(3)
    for _ in range(5000):
        value = numbers.choice(
            [
                numbers.uniform(0, 3),
                numbers.uniform(0.99, 1.01),
                10 ** numbers.uniform(-40, 38),
                0.0,
            ]
        )
        max_norm = numbers.choice(
            [1, 1.0, numbers.uniform(0, 5), 10 ** numbers.uniform(-12, 38), 1e40]
        )
        norm = torch.tensor(value, dtype=dtype)
        coefficient, plain = (
            clip_coefficient(max_norm, norm),
            torch.clamp(max_norm / (norm + 1e-6), max=1.0),
        )
        assert coefficient.dtype == plain.dtype and torch.equal(coefficient, plain), (
            value,
            max_norm,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm_in_one_order_equals_torch_and_leaves_gradients_unchanged(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    gradients = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((7, 5), (3,))
    ]
    before = [gradient.clone() for gradient in gradients]
    norm = order_free_norm(gradients, [35, 3])
    assert torch.allclose(norm, torch.cat([g.double().flatten() for g in before]).norm(), rtol=1e-6)
    assert all(map(torch.equal, gradients, before))
