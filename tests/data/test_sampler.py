from __future__ import annotations

import itertools
import random

import pytest
from support.datasets import reference_batches

from danling.data import PositionedBatchSampler


def make(length: int, batch_size: int, world: int, rank: int, **settings: object) -> PositionedBatchSampler:
    return PositionedBatchSampler(length, batch_size=batch_size, world_size=world, rank=rank, **settings)  # type: ignore[arg-type]


def counts_of(sampler: PositionedBatchSampler) -> list[tuple[int | None, int | None]]:
    return [(batch.samples, batch.total) for batch in sampler.batches(itertools.repeat(None))]


def indices(sampler: PositionedBatchSampler) -> list[list[int]]:
    return [key.indices for key in sampler]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_equals_a_naive_reference(pad: bool, drop_last: bool, shuffle: bool) -> None:
    for length, batch_size, world in itertools.product(range(1, 15), (1, 2, 3), (1, 2, 3, 4)):
        order = list(make(length, 1, 1, 0, shuffle=shuffle, seed=3).order(2))
        expected = reference_batches([int(i) for i in order], batch_size, world, pad)
        if drop_last:
            expected = expected[: length // (batch_size * world)]
        for rank in range(world):
            sampler = make(length, batch_size, world, rank, shuffle=shuffle, drop_last=drop_last, pad=pad, seed=3)
            sampler.epoch = 2
            mine = [parts[rank] for parts in expected if parts[rank]]
            assert indices(sampler) == mine
            assert len(sampler) == len(mine)
            assert all(key.epoch == 2 for key in sampler)


def test_counts_are_exact_and_padding_counts_nothing() -> None:
    for length, world, pad in itertools.product(range(1, 15), (1, 2, 3, 4), (False, True)):
        samplers = [make(length, 2, world, rank, pad=pad, shuffle=True) for rank in range(world)]
        counts = [counts_of(sampler) for sampler in samplers]
        assert sum(samples for own in counts for samples, _ in own) == length
        for sampler, own in zip(samplers, counts, strict=True):
            assert len(own) == len(sampler) == len(indices(sampler))
            for batch, (samples, _) in zip(indices(sampler), own, strict=True):
                assert len(batch) == samples or (samples == 0 and len(batch) == 1)
        for step in range(max(len(own) for own in counts)):
            given = [own[step] for own in counts if step < len(own)]
            assert all(total == sum(samples for samples, _ in given) for _, total in given)
        even = len({len(own) for own in counts}) == 1
        assert all(sampler.even == even for sampler in samplers)


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(make(50, 1, 1, 0, shuffle=True, seed=seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(int(i) for i in order) == list(range(50)) for order in orders)


def test_changing_world_and_batch_size_keeps_the_global_order() -> None:
    """Any path of worlds and batch sizes, ending anywhere, reads each sample of the epoch once and in order."""
    walk = random.Random(0)
    for _ in range(200):
        length = walk.randrange(1, 60)
        expected = [int(i) for i in make(length, 1, 1, 0, shuffle=True, seed=5).order(3)]
        consumed, seen = 0, []
        while consumed < length:
            world, batch_size, updates = walk.choice([1, 2, 3, 4]), walk.choice([1, 2, 5]), walk.randrange(1, 4)
            samplers = [make(length, batch_size, world, r, shuffle=True, seed=5, pad=True) for r in range(world)]
            for sampler in samplers:
                sampler.epoch, sampler.consumed = 3, consumed
            streams = [list(zip(sampler, counts_of(sampler), strict=True)) for sampler in samplers]
            assert len({len(stream) for stream in streams}) == 1
            for step in range(min(updates, len(streams[0]))):
                for stream in streams:
                    batch, (samples, _) = stream[step]
                    seen += batch.indices[:samples]
                samplers[0].advance(1)
                consumed = samplers[0].consumed
        assert seen == expected


def test_number_of_batches_from_any_position() -> None:
    for length, world, drop_last in itertools.product((7, 12), (1, 2, 3), (False, True)):
        for consumed, rank in itertools.product(range(length + 1), range(world)):
            sampler = make(length, 2, world, rank, drop_last=drop_last)
            sampler.consumed = consumed
            assert sampler.remaining() == len(indices(sampler)) == len(counts_of(sampler))


def test_an_iterator_under_way_is_not_moved() -> None:
    sampler = make(6, 2, 1, 0)
    iterator = iter(sampler)
    sampler.epoch, sampler.consumed = 4, 6
    assert list(iterator) == [(0, 0, [0, 1]), (0, 2, [2, 3]), (0, 4, [4, 5])]
    assert list(sampler) == []


def test_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected 0 <= rank < world_size\. Received: rank=2, world_size=2"):
        make(4, 1, 2, 2)
