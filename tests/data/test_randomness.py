from __future__ import annotations

import random
from pathlib import Path

import numpy
import pytest
import torch
from support.datasets import host_state

from danling.data import capture_random_state, derive_seed, preserved_random_state, restore_random_state, seed_streams
from danling.data.host_streams import HOST_STREAMS, HostStreams
from danling.data.randomness import deterministic_kernels, mix_seed


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
    parts = [(0,), (1,), ("1",), (1, 1), (11,), ("", "ab"), ("a", "b"), ("ab",), (-1,), (2**70,), ("i1:1",)]
    assert len({derive_seed(*part) for part in parts}) == len(parts)
    assert all(0 <= derive_seed(*part) < 2**63 for part in parts)


def test_derived_seed_is_the_same_in_every_process() -> None:
    """Strings hash otherwise in each of them; the number is that of a process of another day."""
    assert derive_seed(42, "train", 7) == 1783253372788720138


def test_derive_seed_refuses_other_types() -> None:
    with pytest.raises(TypeError, match=r"Expected seed parts.*Received: part=1\.5"):
        derive_seed(1.5)  # type: ignore[arg-type]


def test_mixed_seeds_do_not_collide() -> None:
    seeds = {mix_seed(derive_seed(0, "sample", epoch), index) for epoch in range(5) for index in range(20_000)}
    assert len(seeds) == 100_000


def test_seed_streams_seeds_all_three() -> None:
    seed_streams(5)
    first = draw()
    seed_streams(5)
    assert draw() == first
    seed_streams(6)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


@pytest.mark.parametrize("gauss_held_back", [False, True])
def test_captured_state_comes_back_through_a_file(tmp_path: Path, gauss_held_back: bool) -> None:
    seed_streams(1)
    if gauss_held_back:
        numpy.random.randn()
        random.gauss(0, 1)
    torch.save(capture_random_state(), tmp_path / "state.pt")
    expected = [draw() for _ in range(3)]
    seed_streams(9)
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [draw() for _ in range(3)] == expected


def test_other_bit_generators_of_numpy_are_supported() -> None:
    original = numpy.random.get_bit_generator()
    try:
        for kind in (numpy.random.PCG64, numpy.random.Philox, numpy.random.SFC64):
            numpy.random.set_bit_generator(kind(3))
            state = capture_random_state()
            expected = draw()
            with preserved_random_state(seed=4):
                inside = draw()
            restore_random_state(state)
            assert draw() == expected
            with preserved_random_state(seed=4):
                assert draw() == inside
    finally:
        numpy.random.set_bit_generator(original)


@pytest.mark.parametrize("held_back", [0, 1])
def test_preserved_state_is_untouched(held_back: int) -> None:
    seed_streams(2)
    for _ in range(held_back):
        numpy.random.randn()
        random.gauss(0, 1)
    before = host_state()
    for seed in (None, 3, 3):
        with preserved_random_state(seed=seed):
            draw()
            numpy.random.randn()
        assert host_state() == before
    with pytest.raises(KeyError), preserved_random_state(seed=3):
        draw()
        raise KeyError
    assert host_state() == before


def test_preserved_state_seeds_inside() -> None:
    with preserved_random_state(seed=3):
        first = draw()
    with preserved_random_state(seed=3):
        assert draw() == first


def test_quick_numpy_path_agrees_with_numpy_on_a_random_walk() -> None:
    """Saving, drawing, nesting and restoring in any order never loses a held back deviate."""
    walk = random.Random(0)
    streams = HostStreams()
    stack = []
    for _ in range(400):
        action = walk.choice(["draw", "gauss", "save", "back", "seed", "set"])
        if action == "draw":
            numpy.random.rand(walk.randrange(1, 700))
        elif action == "gauss":
            numpy.random.randn()
        elif action == "save":
            before = host_state()
            stack.append((streams.save(), before))
            assert host_state() == before
        elif action == "seed":
            seed_streams(walk.randrange(3))
        elif stack:
            saved, expected = stack.pop()
            streams.put_back(saved)
            assert host_state() == expected


def test_restoring_an_earlier_state_with_a_held_back_deviate() -> None:
    seed_streams(8)
    numpy.random.randn()
    held_back = capture_random_state()
    numpy.random.randn()
    HOST_STREAMS.put_back(HOST_STREAMS.save())
    restore_random_state(held_back)
    before = host_state()
    with preserved_random_state():
        numpy.random.randn()
    assert host_state() == before


def test_preserving_works_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danling.data.host_streams._numpy", [None])
    state = capture_random_state()
    assert "numpy" not in state
    before = torch.get_rng_state()
    with preserved_random_state(seed=1):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    restore_random_state(state)


def test_deterministic_kernels_are_asked_for_inside_only() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="inside"), deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
        raise RuntimeError("inside")
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark)
