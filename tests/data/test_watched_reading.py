"""Reading that seeds only what is drawn from gives, bit by bit, what reading with everything seeded gives."""

from __future__ import annotations

import functools
import logging
import random
import sys
import types
from collections.abc import Callable
from random import Random as Own
from typing import Any, ClassVar

import numpy
import pytest
import torch
from numpy.random import default_rng as rng_of
from support.datasets import host_state
from torch import Tensor
from torch import initial_seed as seed_of
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from danling.data import DataLoader, KeyedDataset, preserved_random_state
from danling.data.host_streams import HOST_STREAMS
from danling.data.keyed import declared_draws
from danling.data.reading_code import may_look_at_streams
from danling.data.watched_reading import SeenDraws, WatchedReading

TORCH, PYTHON, NUMPY = 0, 1, 2


class Rows(Dataset[Tensor]):
    """Rows of (index, epoch, what a function of the index draws); counts its reads in this process."""

    def __init__(self, draw: Callable[[int, int], float], length: int = 24) -> None:
        self.draw = draw
        self.length = length
        self.epoch = 0
        self.reads = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        return torch.tensor([index, self.epoch, self.draw(index, self.epoch)], dtype=torch.float64)


class Batches(Rows):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def nothing(index: int, epoch: int) -> float:
    return 0.0


def everything(index: int, epoch: int) -> float:
    return float(torch.rand(())) + random.random() + float(numpy.random.randn())


def only_torch(index: int, epoch: int) -> float:
    return float(torch.rand(()))


def only_numpy(index: int, epoch: int) -> float:
    return float(numpy.random.randn())


def only_python(index: int, epoch: int) -> float:
    return random.gauss(0, 1)


def rarely(index: int, epoch: int) -> float:
    return random.random() if index % 1000 == 7 else 0.0


def one_after_the_other(index: int, epoch: int) -> float:
    return [nothing, only_torch, only_numpy, only_python][index * 4 // 24](index, epoch)


def from_the_second_epoch(index: int, epoch: int) -> float:
    return everything(index, epoch) if epoch else 0.0


def raises_where_nothing_is_seeded(index: int, epoch: int) -> float:
    if index == 13 and epoch == 1:
        drawn = random.random()
        if drawn != KEYED_DRAW[0]:
            raise RuntimeError("not the keyed number")
        return drawn
    return 0.0


def reseeds(index: int, epoch: int) -> float:
    if index % 5 == 4:
        torch.manual_seed(3)
        return float(torch.rand(()))
    return only_torch(index, epoch) if index % 5 == 3 else 0.0


KEYED_DRAW = [0.0]
DRAWS = [
    *(nothing, everything, only_torch, only_numpy, only_python, rarely),
    *(one_after_the_other, from_the_second_epoch, reseeds),
]


def add_noise(rows: list[Tensor]) -> Tensor:
    """Collate, and draw now and then."""
    batch = default_collate(rows)
    return batch + (torch.rand(()) + numpy.random.rand() if int(batch[0, 0]) % 3 == 0 else 0)


def keyed_passes(dataset: Rows, loader: DataLoader, epochs: int, collate_fn: Any = None) -> list[Tensor]:
    """Return what all streams seeded give for each sample of the order, from a fresh view and in another state of the streams."""
    batches = []
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        loader.set_epoch(epoch)
        for keys in loader.positions:
            torch.rand(5), random.random(), numpy.random.randn()
            keyed = KeyedDataset(dataset, loader.seed, collates=collate_fn is not None, collate_fn=collate_fn)
            batches.append((collate_fn or default_collate)(keyed.__getitems__(keys)))
    loader.set_epoch(0)
    return batches


def passes(loader: DataLoader, epochs: int) -> list[Tensor]:
    """Return the batches of epochs."""
    batches = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches += list(loader)
    return batches


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def make_loader(dataset: Any, **settings: Any) -> DataLoader:
    return DataLoader(dataset, batch_size=3, shuffle=True, seed=5, **settings)


@pytest.mark.parametrize("kind", [Rows, Batches])
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_batches_are_those_of_the_keyed_order(draw: Callable[[int, int], float], kind: type[Rows]) -> None:
    torch.manual_seed(3)
    loader = make_loader(kind(draw))
    expected = keyed_passes(kind(draw), loader, 3)
    before = host_state()
    assert_same(passes(loader, 3), expected)
    assert host_state() == before


def test_one_sample_in_a_thousand_draws() -> None:
    dataset = Rows(rarely, 3000)
    loader = DataLoader(dataset, batch_size=50, shuffle=True, seed=5)
    expected = keyed_passes(Rows(rarely, 3000), loader, 1)
    assert_same(passes(loader, 1), expected)
    drawn = torch.cat(expected)[:, 2]
    assert int((drawn != 0).sum()) == 3
    assert dataset.reads == 3000 + 50  # one batch was read again, with the stream seeded from then on
    assert loader._seen_draws.streams == (PYTHON,)


@pytest.mark.parametrize("draw", [nothing, everything, one_after_the_other], ids=lambda draw: draw.__name__)
def test_a_collate_function_that_draws_now_and_then(draw: Callable[[int, int], float]) -> None:
    loader = make_loader(Rows(draw), collate_fn=add_noise)
    expected = keyed_passes(Rows(draw), loader, 2, add_noise)
    assert len({float(row[2]) for batch in expected for row in batch}) > 4
    before = host_state()
    assert_same(passes(loader, 2), expected)
    assert host_state() == before


def test_a_collate_function_over_a_dataset_that_draws_nothing() -> None:
    rows = torch.arange(24.0).reshape(24, 1).expand(24, 3)
    loader = make_loader(rows, collate_fn=add_noise)
    expected = [add_noise(KeyedDataset(rows, 5, collates=True).__getitems__(keys)) for keys in loader.positions]
    assert_same(passes(loader, 1), expected)


def test_items_that_are_delivered_as_they_are() -> None:
    loader = DataLoader(Rows(one_after_the_other), batch_size=None, seed=5, collate_fn=lambda row: row + torch.rand(()))
    expected = []
    for (key,) in loader.positions:
        item = KeyedDataset(Rows(one_after_the_other), 5)[key]
        expected.append(item + torch.rand(()))
    assert_same(passes(loader, 1), expected)


@pytest.mark.parametrize("draw", [rarely, one_after_the_other, from_the_second_epoch], ids=lambda draw: draw.__name__)
def test_workers_decide_for_themselves(draw: Callable[[int, int], float]) -> None:
    loader = make_loader(Rows(draw), num_workers=2, collate_fn=add_noise)
    expected = keyed_passes(Rows(draw), loader, 2, add_noise)
    assert_same(passes(loader, 2), expected)
    loader.close()


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_a_resumed_pass_goes_on_alike(draw: Callable[[int, int], float]) -> None:
    whole = passes(make_loader(Rows(draw)), 2)
    for stop in (1, 5, 9):
        first, second = make_loader(Rows(draw)), make_loader(Rows(draw))
        first.set_epoch(stop // 8)
        list(first)
        first.advance(stop % 8)
        second.load_state_dict(first.state_dict())
        assert_same(list(second), whole[stop : 8 * (stop // 8 + 1)])


@pytest.mark.parametrize(
    ("draw", "streams"),
    [(nothing, ()), (only_torch, (TORCH,)), (only_numpy, (NUMPY,)), (only_python, (PYTHON,)), (everything, (0, 1, 2))],
)
def test_only_streams_that_are_drawn_from_are_seeded(draw: Any, streams: tuple[int, ...]) -> None:
    """A dataset that always draws shows it in the first batch, so nothing is read twice."""
    dataset = Rows(draw)
    loader = make_loader(dataset)
    list(loader)
    assert loader._seen_draws.streams == streams
    assert dataset.reads == 24


def test_what_was_drawn_while_nothing_was_seeded_is_no_reason_to_fail() -> None:
    loader = make_loader(Rows(raises_where_nothing_is_seeded))
    loader.set_epoch(1)
    seeded = KeyedDataset(Rows(lambda index, epoch: random.random()), 5)
    KEYED_DRAW[0] = float(seeded[(1, 13)][2])
    drawn = {int(row[0]): float(row[2]) for batch in loader for row in batch}
    assert drawn[13] == KEYED_DRAW[0]


def test_an_error_of_a_sample_that_draws_nothing_is_raised_once() -> None:
    def broken(index: int, epoch: int) -> float:
        if index == 13:
            raise ZeroDivisionError
        return 0.0

    dataset = Rows(broken)
    with pytest.raises(ZeroDivisionError):
        list(make_loader(dataset))
    assert dataset.reads <= 24


def test_a_seed_that_was_there_before_counts_as_drawing() -> None:
    """A sample draws what was not seeded, and the next one seeds as this process was."""

    def twice(index: int, epoch: int) -> float:
        if index in (4, 5):
            drawn = everything(index, epoch)
            for seed in (torch.manual_seed, random.seed, numpy.random.seed):
                seed(0)
            return drawn
        return 0.0

    loader = DataLoader(Rows(twice), batch_size=2, seed=5)
    expected = keyed_passes(Rows(twice), loader, 1)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(0)
    assert_same(list(loader), expected)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("number", [TORCH, PYTHON, NUMPY])
def test_a_stream_set_apart_shows_each_kind_of_draw(number: int, held: bool) -> None:
    stream = HOST_STREAMS.all[number]
    draws = {
        TORCH: [lambda: torch.rand(()), lambda: torch.randn(3), lambda: torch.manual_seed(0)],
        PYTHON: [random.random, lambda: random.gauss(0, 1), lambda: random.seed(0)],
        NUMPY: [numpy.random.rand, numpy.random.randn, lambda: numpy.random.seed(0)],
    }[number]
    if held:
        torch.randn(()), random.gauss(0, 1), numpy.random.randn()
    before, outside = host_state(), HOST_STREAMS.save()
    for draw in draws:
        assert stream.set_apart()
        assert not stream.was_moved()
        draw()
        assert stream.was_moved()
        stream.put_back(outside[number])
        assert host_state() == before


def test_a_bit_generator_in_the_place_of_numpys_is_always_seeded() -> None:
    original = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        loader = make_loader(Rows(nothing))
        list(loader)
        list(loader)
        assert loader._seen_draws.streams == (NUMPY,)
        loader = make_loader(Rows(one_after_the_other))
        expected = keyed_passes(Rows(one_after_the_other), loader, 1)
        assert_same(list(loader), expected)
    finally:
        numpy.random.set_bit_generator(original)


# Who is never read without seeds


def lazily(index: int, epoch: int) -> float:
    return float(numpy.random.default_rng(torch.initial_seed() % 2**32).random())


def by_helper(index: int, epoch: int) -> float:
    return lazily(index, epoch)


def forked(index: int, epoch: int) -> float:
    with torch.random.fork_rng():
        return float(torch.rand(()))


class Making:
    """Makes a generator for each sample, deep in what a dataset holds."""

    def __call__(self, index: int, epoch: int) -> float:
        return self.draw()

    def draw(self) -> float:
        return random.Random(torch.initial_seed()).random()


class MakingOnce:
    """Makes its data with a generator when it is made, as many do, and draws nothing."""

    def __init__(self) -> None:
        self.data = numpy.random.default_rng(0).random(24)

    def __call__(self, index: int, epoch: int) -> float:
        return float(self.data[index])


class MakingInTurn:
    """Knows the class of what draws, and makes one for each sample."""

    kinds: ClassVar = {"making": Making}
    module: Any = None

    def __init__(self, kind: type[Making] | None = None) -> None:
        self.kind = kind

    def __call__(self, index: int, epoch: int) -> float:
        if self.module is not None:
            return self.module.draw(index, epoch)
        return (self.kind or self.kinds["making"])()(index, epoch)


class OfModule(MakingInTurn):
    """Holds a module."""

    def __init__(self) -> None:
        self.module = types.ModuleType("held_module")
        self.module.draw = lazily


def preserved(index: int, epoch: int) -> float:
    with preserved_random_state():
        return random.random()


def imported(index: int, epoch: int) -> float:
    from imported_late import draw  # type: ignore[import-not-found]

    return draw(index, epoch)


def held_apart(index: int, epoch: int, seed: Callable[[], int] = torch.initial_seed) -> float:
    return float(seed() % 1000003)


sys.modules["imported_late"] = types.ModuleType("imported_late")
sys.modules["imported_late"].draw = lazily  # type: ignore[attr-defined]
PART = functools.partial(torch.initial_seed)
OWN: dict[str, Callable[[int, int], float]] = {
    "from the seed": lazily,
    "by a helper": by_helper,
    "by a closure": lambda index, epoch: [lazily][0](index, epoch),
    "put back": forked,
    "object": Making(),
    "by other names": lambda index, epoch: rng_of(seed_of() % 2**32).random(),
    "a class by another name": lambda index, epoch: Own(PART()).random(),
    "a partial function": lambda index, epoch: float(PART() % 1000003),
    "a class of a class": MakingInTurn(),
    "a class that is held": MakingInTurn(Making),
    "a module that is held": OfModule(),
    "an import while reading": imported,
    "a default": held_apart,
    "a copy of the stream": lambda index, epoch: float(
        torch.rand((), generator=torch.random.default_generator.clone_state())
    ),
    "the library's own": preserved,
    "an array of objects": functools.partial(lambda held, index, epoch: held[0](index, epoch), numpy.array([Making()])),
}


@pytest.mark.parametrize("name", sorted(OWN))
def test_own_generators_are_keyed_by_sample(name: str) -> None:
    assert may_look_at_streams({"dataset": Rows(OWN[name])})
    loader = make_loader(Rows(OWN[name]))
    expected = keyed_passes(Rows(OWN[name]), loader, 2)
    assert_same(passes(loader, 2), expected)
    assert len({float(row[2]) for batch in expected for row in batch}) == 48


@pytest.mark.parametrize("draw", [*DRAWS, MakingOnce()], ids=lambda draw: getattr(draw, "__name__", "made once"))
def test_code_that_only_draws_is_not_suspected(draw: Any) -> None:
    for dataset in (Rows(draw), Subset(Rows(draw), range(4)), ConcatDataset([Rows(draw), Batches(draw)])):
        assert not may_look_at_streams({"dataset": dataset})


def test_what_is_not_imported_yet_is_not_known() -> None:
    def draw(index: int, epoch: int) -> float:
        if epoch > 100:
            import not_there_yet  # type: ignore[import-not-found]

            return not_there_yet.draw()
        return 0.0

    assert may_look_at_streams({"dataset": Rows(draw)})


def test_an_iterator_that_goes_on_where_it_is_is_read_once() -> None:
    class Endless(Rows):
        def __init__(self) -> None:
            super().__init__(nothing)
            self.numbers = iter(range(1000))

        def __getitem__(self, index: int) -> Tensor:
            return super().__getitem__(index) + next(self.numbers) + (random.random() if index > 11 else 0)

    dataset = Endless()
    assert len(list(DataLoader(dataset, batch_size=3, seed=5))) == 8
    assert dataset.reads == next(dataset.numbers) == 24


def test_a_dataset_that_keeps_what_it_drew_is_named(caplog: pytest.LogCaptureFixture) -> None:
    held: dict[int, float] = {}

    def keeping(index: int, epoch: int) -> float:
        return held.setdefault(index, random.random()) if index > 11 and index not in held else held.get(index, 0.0)

    dataset = Rows(keeping)
    with caplog.at_level(logging.WARNING, "danling"):
        rows = torch.cat(list(DataLoader(dataset, batch_size=3, seed=5)))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["Rows keeps what it draws at random"]
    held.clear()
    expected = torch.cat(keyed_passes(Rows(keeping), DataLoader(dataset, batch_size=3, seed=5), 1))
    assert torch.equal(rows[15:], expected[15:])


def test_no_warning_where_the_second_reading_takes_another_branch(caplog: pytest.LogCaptureFixture) -> None:
    def branching(index: int, epoch: int) -> float:
        if index < 6:
            return 0.0
        return float(numpy.random.rand()) if random.random() < 0.5 else float(torch.rand(()))

    loader = DataLoader(Rows(branching), batch_size=3, seed=5)
    assert_same(passes(loader, 2), keyed_passes(Rows(branching), loader, 2))
    assert not caplog.records


def test_a_batch_without_samples_is_made_by_the_collate_function() -> None:
    reading = WatchedReading(KeyedDataset(Rows(nothing), 5, collates=True, collate_fn=len), len, SeenDraws())
    assert reading.__getitems__([]) == 0


class Counting(Rows):
    """Has a state that reading changes."""

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Declared(Rows):
    """Says whether it draws."""

    def __init__(self, draw: Callable[[int, int], float], draws_random: Any) -> None:
        super().__init__(draw)
        self.draws_random = draws_random


@pytest.mark.parametrize("dataset", [Counting(rarely), Declared(rarely, True)], ids=["state", "declared"])
def test_what_may_not_be_read_twice_is_seeded_from_the_first_sample_on(dataset: Rows) -> None:
    loader = make_loader(dataset)
    expected = keyed_passes(Rows(rarely), loader, 2)
    assert_same(passes(loader, 2), expected)
    assert dataset.reads == 48


def test_who_says_to_draw_nothing_is_taken_at_the_word() -> None:
    dataset = Declared(nothing, False)
    loader = make_loader(dataset)
    before = host_state()
    assert len(list(loader)) == 8
    assert host_state() == before and loader._seen_draws.streams is None


def test_what_parts_of_a_dataset_say_counts_for_the_whole() -> None:
    quiet, noisy, silent = Declared(nothing, False), Declared(nothing, True), Rows(nothing)
    assert declared_draws(Subset(noisy, [1])) is True
    assert declared_draws(ConcatDataset([quiet, Subset(noisy, [1])])) is True
    assert declared_draws(ConcatDataset([quiet, silent])) is None
    with pytest.raises(ValueError, match="draws_random to be True or False. Received: draws_random='no'"):
        make_loader(Declared(nothing, "no"))


def test_generators_that_appear_are_keyed_from_the_batch_in_which_they_do() -> None:
    class Lazy(Rows):
        rng: Any = None

        def __getitem__(self, index: int) -> Tensor:
            if self.rng is None and index == 11:
                self.rng = numpy.random.default_rng(1)
            row = super().__getitem__(index)
            row[2] = 0.0 if self.rng is None else self.rng.random()
            return row

    loader = DataLoader(Lazy(nothing), batch_size=4, seed=5)
    rows = torch.cat(list(loader))
    dataset = Lazy(nothing)
    dataset.rng = numpy.random.default_rng(2)
    expected = torch.cat(list(DataLoader(dataset, batch_size=4, seed=5)))
    assert torch.equal(rows[8:], expected[8:])


def test_a_second_view_knows_what_the_first_one_saw() -> None:
    seen = SeenDraws()
    dataset = Rows(only_numpy)
    for _ in range(2):
        reading = WatchedReading(KeyedDataset(dataset, 5), None, seen)
        reading.__getitems__([(0, 1), (0, 2)])
    assert seen.streams == (NUMPY,)
    assert dataset.reads == 4


class Unknown(Rows):
    """Its code imports something that is not there yet."""

    def __getitem__(self, index: int) -> Tensor:
        if index < 0:
            import brought_about_later  # type: ignore[import-not-found]

            brought_about_later.draw()
        return super().__getitem__(index)


def test_what_may_look_at_a_stream_is_not_looked_at_again_and_another_object_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert may_look_at_streams({"dataset": Unknown(nothing)})
    monkeypatch.setitem(sys.modules, "brought_about_later", types.ModuleType("brought_about_later"))
    assert may_look_at_streams({"dataset": Unknown(nothing)}), "remembered, of another one that holds the same"
    assert not may_look_at_streams({"dataset": Unknown(only_numpy)}), "looked at, since it holds something else"
    assert may_look_at_streams({"dataset": Unknown(OWN["a class that is held"])})


CHANGING: Any = None
"""What the reading below calls, where there is something."""


def test_a_variable_of_a_module_that_changes_from_pass_to_pass_is_looked_at_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw(index: int, epoch: int) -> float:
        return 0.0 if CHANGING is None else float(CHANGING(index, epoch))

    def of_seed(index: int, epoch: int) -> float:
        return float(torch.initial_seed() % 10007)

    loader = make_loader(Rows(draw))
    assert not any(row[2] for batch in passes(loader, 1) for row in batch)
    monkeypatch.setattr(sys.modules[__name__], "CHANGING", of_seed)
    expected = keyed_passes(Rows(of_seed), loader, 1)
    assert len({float(row[2]) for batch in expected for row in batch}) > 20
    assert_same(passes(loader, 1), expected)
