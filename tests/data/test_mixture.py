"""A mixture has its proportions in every prefix, reads each source in its own passes, and comes back exactly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from support.datasets import drain, source_over
from torch import Tensor
from torch.utils.data import Dataset

from danling.data import BatchSource, Mixture
from danling.data.mixture import LARGEST_PERIOD, Turns, proportions_of

WEIGHTS = {"web": 0.7, "code": 0.2, "maths": 0.1}
SIZES = {"web": 40, "code": 7, "maths": 3}


class Numbers(Dataset[Tensor]):
    """Rows of (offset + index, a random number)."""

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.offset + index, torch.rand(()).item()], dtype=torch.float64)


def make_sources() -> dict[str, Numbers]:
    return {name: Numbers(1000 * number, size) for number, (name, size) in enumerate(SIZES.items())}


def make_mixture(weights: Any = None, **settings: Any) -> Mixture:
    return Mixture(
        make_sources(), WEIGHTS if weights is None else weights, **{"length": 50, **settings}
    )


def source_of(mixture: Mixture, rank: int = 0, world_size: int = 1, **settings: Any) -> BatchSource:
    return source_over(
        mixture, rank, world_size, **{"batch_size": 4, "drop_last": False, **settings}
    )


def rows(batches: list[Tensor]) -> Tensor:
    return torch.cat(batches)


def epochs(source: BatchSource, count: int) -> Tensor:
    taken = []
    for _ in range(count):
        taken += drain(source)
        source.finish_pass()
    return rows(taken)


# Proportions


CASES: list[tuple[dict[str, Any], int]] = [
    ({"a": 0.7, "b": 0.3}, 10),
    ({"a": 1, "b": 0}, 1),
    ({"a": 1, "b": 1, "c": 1}, 3),
    ({"a": Fraction(1, 3), "b": Fraction(2, 3)}, 3),
    ({"a": 97, "b": 2, "c": 1, "d": 13, "e": 29}, 142),
    ({"a": 0.499, "b": 0.501}, 1000),
]


@pytest.mark.parametrize(("weights", "period"), CASES, ids=str)
def test_every_prefix_has_the_proportions_to_less_than_one_sample(
    weights: dict[str, Any], period: int
) -> None:
    turns = Turns(tuple(proportions_of(weights).values()))
    assert turns.period == period
    counts = [0] * len(weights)
    total = sum(Fraction(str(weight)) for weight in weights.values())
    for turn in range(2 * period + 3):
        assert turns.counts(turn) == counts
        party, number = turns.at(turn)
        assert number == counts[party]
        counts[party] += 1
        for count, weight in zip(counts, weights.values(), strict=True):
            assert abs(count - (turn + 1) * Fraction(str(weight)) / total) < 1
    for party, share in enumerate(turns.shares):
        for number in range(1, 2 * turns.in_period[party]) if share else ():
            length = turns.turns_until(party, number)
            assert turns.counts(length)[party] == number == turns.counts(length - 1)[party] + 1


def test_too_fine_shares_are_rounded_to_one_in_a_million() -> None:
    shares = proportions_of({"a": 0.123456789, "b": 0.5, "c": 1e-12, "d": 0})
    assert sum(shares.values()) == 1
    assert all((share * LARGEST_PERIOD).denominator == 1 for share in shares.values())
    total = 0.623456789
    assert abs(float(shares["a"]) - 0.123456789 / total) < 2e-6
    assert shares["c"] == Fraction(1, LARGEST_PERIOD) and shares["d"] == 0


# What is read


def test_each_source_is_read_in_passes_of_its_own() -> None:
    mixture = make_mixture()
    taken = epochs(source_of(mixture), 4)[:, 0].long()
    for number, (name, size) in enumerate(SIZES.items()):
        own = taken[taken // 1000 == number] - 1000 * number
        assert len(own) == int(200 * WEIGHTS[name] + 0.5)
        passes = own.split(size)
        for one in passes[:-1]:
            assert sorted(one.tolist()) == list(range(size))
        assert len(set(passes[-1].tolist())) == len(passes[-1])
        whole = [tuple(one.tolist()) for one in passes if len(one) == size]
        assert (
            size < 4 or len({*whole, tuple(range(size))}) == len(whole) + 1
        )  # of three samples there are six orders


def test_how_long_an_epoch_is() -> None:
    def reads(samples: int) -> list[tuple[int, int]]:
        return list(zip(make_mixture().samples(0, samples).values(), SIZES.values(), strict=True))

    longest, shortest = len(make_mixture(length="longest")), len(make_mixture(length="shortest"))
    assert all(count >= own for count, own in reads(longest)) and any(
        count < own for count, own in reads(longest - 1)
    )
    assert all(count <= own for count, own in reads(shortest)) and any(
        count > own for count, own in reads(shortest + 1)
    )
    assert len(make_mixture(length=17)) == 17


def by_epoch(epoch: int) -> dict[str, float]:
    return {"web": 1, "code": epoch, "maths": 0}


@pytest.mark.parametrize(
    "weights",
    [by_epoch, {0: by_epoch(0), 1: by_epoch(1), 2: by_epoch(2)}],
    ids=["function", "mapping"],
)
def test_weights_change_by_epoch_and_sources_keep_their_position(weights: Any) -> None:
    mixture = make_mixture(weights, length=12)
    taken = epochs(source_of(mixture), 3)[:, 0].long()
    numbers = [(taken[12 * epoch : 12 * epoch + 12] // 1000).tolist() for epoch in range(3)]
    assert [part.count(0) for part in numbers] == [12, 6, 4]
    own = taken[taken < 1000].tolist()
    assert len(set(own)) == len(own) == 22  # no sample twice before each was read
    assert mixture.samples(2, 12) == {"web": 22, "code": 14, "maths": 0}
    assert mixture.samples(1, 3)["web"] + mixture.samples(1, 3)["code"] == 15


# Resuming


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_at_every_position(workers: int) -> None:
    whole = epochs(source_of(make_mixture()), 2)
    for stop in range(0, 26, 1 if not workers else 9):
        first = source_of(make_mixture())
        epoch, batches = divmod(stop, 13)
        taken = [epochs(first, epoch)] if epoch else []
        taken += drain(first, batches)
        second = source_of(make_mixture(), num_workers=workers)
        second.load_state_dict(first.state_dict())
        taken += [epochs(second, 2 - epoch)]
        assert torch.equal(rows(taken), whole)
        second.close()


def test_another_mixture_is_refused_and_later_weights_are_not() -> None:
    def state() -> dict[str, Any]:
        source = source_of(make_mixture())
        epochs(source, 1)
        drain(source, 2)
        return source.state_dict()

    source_of(make_mixture({0: WEIGHTS, 2: by_epoch(2)})).load_state_dict(state())
    for other, what in (
        (make_mixture({**WEIGHTS, "web": 0.6}), r"shares by epoch \(0: 7/10, 1/5, 1/10\)"),
        (make_mixture({0: WEIGHTS, 1: by_epoch(2)}), "shares by epoch"),
        (
            Mixture({**make_sources(), "web": Numbers(0, 41)}, WEIGHTS, length=50),
            "sources .*web: 41",
        ),
        (make_mixture(shuffle=False), "shuffle"),
    ):
        with pytest.raises(ValueError, match=what):
            source_of(other).load_state_dict(state())


# Labels


def test_labels_of_each_form_of_sample() -> None:
    weights = {"only": 1}
    assert Mixture({"only": [{"input": 1}]}, weights, labelled=True)[0] == {"input": 1, "source": 0}
    assert Mixture({"only": [(1, 2)]}, weights, labelled=True)[0] == (1, 2, 0)
    with pytest.raises(ValueError, match="Received: int from source 'only'"):
        Mixture({"only": [7]}, weights, labelled=True)[0]


def test_measured_values_are_summed_by_source() -> None:
    mixture = Mixture(
        {"web": range(2), "code": range(2), "rest": range(2)}, {"web": 1, "code": 1, "rest": 1}
    )
    found = mixture.by_source(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]))
    assert found == {"web": (2.0, 1.0), "code": (5.0, 2.0), "rest": (0.0, 0.0)}


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, {}), "Expected datasets by name"),
        (([range(3)], {}), "Expected datasets by name"),
        (({"a": iter([1])}, {"a": 1}), "source 'a' to be a map-style dataset"),
        (({"a": []}, {"a": 1}), "source 'a' to have samples"),
        (({"a": range(3)}, {"b": 1}), r"sources \['a'\] at epoch 0. Received: \['b'\]"),
        (
            ({"a": range(3)}, {"a": -1}),
            "finite number of at least 0. Received: weights\\['a'\\]=-1",
        ),
        (({"a": range(3)}, {"a": float("nan")}), "finite number"),
        (({"a": range(3)}, {"a": "much"}), "finite number"),
        (({"a": range(3)}, {"a": 0}), "a weight above zero"),
        (({"a": range(3)}, {1: {"a": 1}}), "begin at epoch 0"),
        (({"a": range(3)}, lambda epoch: None), "a weight for each"),
        (
            ({"a": range(3)}, 0.5),
            r"a weight for each of the sources \['a'\] at epoch 0. Received: 0.5",
        ),
    ],
)
def test_mistakes_are_named(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture(*arguments)


def test_impossible_length_and_shuffling_loader_are_named() -> None:
    for length in (0, "all", True, 1.5):
        with pytest.raises(ValueError, match="'longest', 'shortest' or a positive number"):
            make_mixture(length=length)
    with pytest.raises(ValueError, match="Expected no dataloader.shuffle for split 'train'"):
        source_of(make_mixture(), shuffle=True)
    with pytest.raises(IndexError, match="between 0 and 49"):
        make_mixture()[50]


def test_a_mixture_in_a_mixture_takes_its_order_from_the_seed_too() -> None:
    orders = set()
    for seed in (1, 2, 1):
        inner = make_mixture(length=20)
        Mixture({"inner": inner}, {"inner": 1}, shuffle=False).set_seed(seed)
        orders.add(tuple(int(inner[position][0]) for position in range(20)))
    assert len(orders) == 2
