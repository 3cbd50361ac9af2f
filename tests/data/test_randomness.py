from __future__ import annotations

import itertools
import math
import random

import numpy
import pytest
import torch

from danling.data import derive_seed, seed_streams
from danling.data.randomness import Generators, deterministic_kernels, mix_seed


def draw() -> list[float]:
    return [
        torch.rand(()).item(),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        random.random(),
        random.gauss(0, 1),
    ]


def test_derived_seeds_are_fixed_and_distinct() -> None:
    assert derive_seed(0, "order", 1) == derive_seed(0, "order", 1)
    parts = [
        (0,),
        (1,),
        ("1",),
        (1, 1),
        (11,),
        ("", "ab"),
        ("a", "b"),
        ("ab",),
        (-1,),
        (2**70,),
        ("i1:1",),
    ]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= derive_seed(*part) < 2**63 for part in parts)

    # Strings hash otherwise in each process; the number is that of a process of another day.
    assert derive_seed(42, "train", 7) == 1783253372788720138
    with pytest.raises(TypeError, match=r"Expected seed parts.*Received: part=1\.5"):
        derive_seed(1.5)  # type: ignore[arg-type]


def test_mixed_seeds_do_not_collide() -> None:
    seeds = {
        mix_seed(derive_seed(0, "sample", epoch), index)
        for epoch in range(5)
        for index in range(20_000)
    }
    assert len(seeds) == 100_000


def test_seed_streams_seeds_all_three() -> None:
    seed_streams(5)
    first = draw()
    seed_streams(5)
    assert draw() == first
    seed_streams(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))
    numpy.random.randn(), random.gauss(0, 1)  # which hold a deviate back
    seed_streams(5)
    assert draw() == first


@pytest.mark.parametrize("n", [pytest.param(224, marks=pytest.mark.slow), 256])
def test_streams_draw_independently_of_each_other(n: int) -> None:
    """All pairs of streams, among them generators that an object holds: the first integer below n agrees for one key in n."""

    class Holder:
        torch_rng = torch.Generator()
        numpy_rng = numpy.random.RandomState()
        python_rng = random.Random()

    holder, keys = Holder(), 10_000
    generators, base = Generators({"dataset": holder}), derive_seed(0, "read", "train", 0)
    assert len(generators.found) == 3
    drawn = []
    for number in range(keys):
        generators.seed(mix_seed(base, number))
        drawn.append(
            [
                int(torch.randint(n, ())),
                int(numpy.random.randint(n)),
                random.randrange(n),
                int(torch.randint(n, (), generator=holder.torch_rng)),
                int(holder.numpy_rng.randint(n)),
                holder.python_rng.randrange(n),
            ]
        )
    for modulus in (2, 4, 8, 16, 32, 64, 128, 256) if n == 256 else (n,):
        sigma = math.sqrt((1 / modulus) * (1 - 1 / modulus) / keys)
        for one, other in itertools.combinations(torch.tensor(drawn).T % modulus, 2):
            assert abs((one == other).double().mean().item() - 1 / modulus) < 4 * sigma, modulus


def test_seeding_works_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.data.randomness.get_numpy", lambda: None)
    seed_streams(1)
    first = torch.rand(3)
    seed_streams(1)
    assert torch.equal(torch.rand(3), first)


def test_deterministic_kernels_are_asked_for_inside_only() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="inside"), deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        raise RuntimeError("inside")
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
