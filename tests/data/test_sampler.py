"""Which samples make which batch: every sample once, whatever the number of ranks and micro-batches."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from support.datasets import reference_batches

from danling.data import Division, PositionedBatchSampler, Share


def make(
    length: int, batch_size: int, world: int, rank: int, **settings: Any
) -> PositionedBatchSampler:
    share = Share(seed=settings.pop("seed", 0), rank=rank, world_size=world)
    return PositionedBatchSampler(length, share, Division.of_batches(batch_size, world), **settings)


def counts_of(sampler: PositionedBatchSampler) -> list[tuple[int | None, int | None]]:
    return [(batch.samples, batch.total) for batch in sampler.batches(itertools.repeat(None))]


def indices(sampler: PositionedBatchSampler) -> list[list[int]]:
    return [key.indices for key in sampler]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_equals_a_naive_reference(pad: bool, drop_last: bool, shuffle: bool) -> None:
    for length, batch_size, world in itertools.product(range(1, 15), (1, 2, 3), (1, 2, 3, 4)):
        order = make(length, 1, 1, 0, shuffle=shuffle, seed=3).order(2).indices(0, length)
        expected = reference_batches(order, batch_size, world, pad)
        if drop_last:
            expected = expected[: length // (batch_size * world)]
        for rank in range(world):
            sampler = make(
                length,
                batch_size,
                world,
                rank,
                shuffle=shuffle,
                drop_last=drop_last,
                pad=pad,
                seed=3,
            )
            sampler.epoch = 2
            mine = [parts[rank] for parts in expected if parts[rank]]
            assert indices(sampler) == mine and len(sampler) == len(mine)
            assert all(key.epoch == 2 for key in sampler)
            for sampler.consumed in range(length):
                assert (
                    sampler.remaining_batches() == len(indices(sampler)) == len(counts_of(sampler))
                )


def test_order_depends_on_seed_and_epoch() -> None:
    made = [
        make(50, 1, 1, 0, shuffle=True, seed=seed).order(epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    orders = {tuple(order.indices(0, 50)) for order in made}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_changing_world_and_batch_size_keeps_the_global_order() -> None:
    """Any path of worlds and batch sizes, ending anywhere, reads each sample of the epoch once and in order."""
    walk = random.Random(0)
    for _ in range(200):
        length = walk.randrange(1, 60)
        expected = make(length, 1, 1, 0, shuffle=True, seed=5).order(3).indices(0, length)
        consumed, seen = 0, []
        while consumed < length:
            world, batch_size, updates = (
                walk.choice([1, 2, 3, 4]),
                walk.choice([1, 2, 5]),
                walk.randrange(1, 4),
            )
            samplers = [
                make(length, batch_size, world, r, shuffle=True, seed=5, pad=True)
                for r in range(world)
            ]
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


def test_an_iterator_under_way_is_not_moved() -> None:
    sampler = make(6, 2, 1, 0)
    iterator = iter(sampler)
    sampler.epoch, sampler.consumed = 4, 6
    assert list(iterator) == [(0, 0, [0, 1]), (0, 2, [2, 3]), (0, 4, [4, 5])]
    assert list(sampler) == []


# How an update is divided

DIVISIONS = [
    (samples, world_size, accum_steps, held)
    for samples, world_size in itertools.product((1, 2, 5, 8, 12, 13), (1, 2, 3, 4, 5))
    if samples >= world_size
    for accum_steps, held in ((1, None), (3, None), (20, None), (1, 1), (1, 2), (1, 5), (1, 100))
]


def divide(samples: int, world_size: int, accum_steps: int, held: int | None) -> Division:
    return Division.of_update(samples, world_size, micro_batches=accum_steps, micro_batch_size=held)


def test_every_sample_goes_to_one_micro_batch_of_one_rank() -> None:
    for of, samples in ((each, samples) for each in DIVISIONS for samples in range(1, each[0] + 1)):
        division, world_size, held = divide(*of), of[1], of[3]
        cuts = [division.cut(samples, rank) for rank in range(world_size)]
        assert {len(cut) for cut in cuts} == {division.count(samples)}
        taken = [list(range(offset, offset + size)) for cut in cuts for offset, size in cut]
        assert list(itertools.chain.from_iterable(taken)) == list(range(samples))
        shares = [sum(size for _, size in cut) for cut in cuts]
        assert max(shares) - min(shares) <= 1
        assert division.totals(samples) == [
            sum(cut[i][1] for cut in cuts) for i in range(len(cuts[0]))
        ]
        most = max(size for cut in cuts for _, size in cut)
        assert most == division.largest(samples) <= min(held or most, division.micro_batch_size)
        assert all(any(cut[i][1] for cut in cuts) for i in range(len(cuts[0]))), (
            "no micro-batch without a sample"
        )


def test_as_many_micro_batches_as_asked_for() -> None:
    assert divide(10, 1, 4, None).cut(10, 0) == [(0, 3), (3, 3), (6, 2), (8, 2)]
    # The last update of an epoch is cut into pieces no larger than those of the others, and into no more than it needs.
    assert divide(64, 1, 4, None).cut(20, 0) == [(0, 10), (10, 10)]
    assert divide(64, 2, 1, 16).count(64) == 2
    assert divide(5, 4, 3, None).micro_batches == 2, (
        "a micro-batch without a sample on any rank has no use"
    )


def test_less_at_once() -> None:
    division = divide(12, 2, 1, None)
    sizes = []
    for held in (6, 3, 1):
        division = division.capped(held)
        sizes.append((division.micro_batch_size, division.micro_batches))
    assert sizes == [(6, 1), (3, 2), (1, 6)]
    assert division.capped(4) is division, "never more than it holds already"


def test_fewer_samples_than_ranks_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"global_batch_size to be at least the number of ranks .*, 4\. Received: .*=3\.",
    ):
        divide(3, 4, 1, None)


def test_even() -> None:
    assert divide(12, 2, 3, None).is_even
    assert not divide(12, 2, 4, None).is_even
    assert not divide(13, 2, 1, None).is_even


def samplers(
    length: int, division: Division, world_size: int, **settings: Any
) -> list[PositionedBatchSampler]:
    shares = [Share(seed=5, rank=rank, world_size=world_size) for rank in range(world_size)]
    return [
        PositionedBatchSampler(length, share, division, **{"shuffle": True, **settings})
        for share in shares
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_updates_have_the_same_samples_at_any_world_size(drop_last: bool) -> None:
    """A pass that changes its number of ranks after every update makes the updates of one rank."""
    for length in (29, 31, 40):
        whole = samplers(length, divide(8, 1, 1, None), 1, drop_last=drop_last)[0]
        expected = [set(key.indices) for key in whole]
        assert len(expected) == len(whole)
        consumed, worlds = (
            0,
            itertools.cycle([(2, 1, None), (1, 3, None), (3, 1, 1), (4, 2, None), (8, 1, None)]),
        )
        for update in expected:
            world_size, accum_steps, held = next(worlds)
            own = samplers(
                length, divide(8, world_size, accum_steps, held), world_size, drop_last=drop_last
            )
            for sampler in own:
                sampler.consumed = consumed
            seen: set[int] = set()
            batches = 0
            for parts in zip(*(sampler.batches(sampler) for sampler in own)):
                batches += 1
                for key, size, total, *_ in parts:
                    assert len(key.indices) == max(size, 1)
                    assert total == sum(part.samples or 0 for part in parts)
                    assert seen.isdisjoint(key.indices[:size])
                    seen |= set(key.indices[:size])
                if parts[0].closes:
                    break
            assert seen == update
            for sampler in own:
                sampler.advance(batches)
                assert sampler.consumed == consumed + len(update)
            consumed += len(update)


def test_every_rank_makes_equally_many_batches() -> None:
    for of in DIVISIONS:
        own = samplers(17, divide(*of), of[1], drop_last=False) if of[0] <= 17 else []
        lengths = {
            (len(s), len(list(s)), len(list(s.batches(itertools.repeat(None)))), s.is_even())
            for s in own
        }
        assert len(lengths) == 1
        assert len(set(lengths.pop()[:3])) == 1


def test_a_part_of_an_update_is_no_position() -> None:
    sampler = samplers(20, divide(8, 1, 4, None), 1)[0]
    for batches, consumed in ((4, 8), (4, 16), (2, 20)):
        sampler.advance(batches)
        assert sampler.consumed == consumed
    sampler.set_epoch(1)
    with pytest.raises(
        ValueError, match=r"Expected the batches of whole updates, 4 of each rank\. Received: 3\."
    ):
        sampler.advance(3)
