"""Generators that a dataset holds are found wherever they are, and keyed by sample like the global streams."""

from __future__ import annotations

import copy
import functools
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from support.datasets import check_resume, drain, source_over
from support.processes import run_processes
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from danling.data import BatchSource, open_source
from danling.data.randomness import Generators, generator_state, set_generator_state

LENGTH = 12


class OwnStream:
    """A transform with a generator of its own, in a slot."""

    __slots__ = ("rng",)

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: float) -> float:
        return value + draw(self.rng)


class Jitter(OwnStream):
    """The same in an attribute."""


class JitterModule(nn.Module):
    """The same as a module, as the transforms of torchvision are."""

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.jitter = Jitter(rng)

    def forward(self, value: float) -> float:
        return self.jitter(value)


class Lazy:
    """Makes its generators when it is first called, from torch's seed, as augmentation libraries do."""

    rng: Any = None

    def __init__(self) -> None:
        self.rngs: dict[str, Any] = {}

    def __call__(self, value: float) -> float:
        if self.rng is None:
            self.rng = numpy.random.default_rng(torch.initial_seed() % 2**32)
        return (
            value
            + draw(self.rng)
            + draw(self.rngs.setdefault("here", random.Random(torch.initial_seed())))
        )


class OfClass:
    """Its generator is one of the class."""

    rng = random.Random(1)

    def __call__(self, value: float) -> float:
        return value + draw(self.rng)


_out_of_sight: dict[int, random.Random] = {}


class SeedsItself:
    """Has a generator where nobody finds it, as one of a library in C, and takes a seed."""

    def __call__(self, value: float) -> float:
        return value + _out_of_sight.setdefault(id(self), random.Random()).random()

    def set_random_seed(self, seed: int | None) -> None:
        _out_of_sight[id(self)] = random.Random(seed)
        numpy.random.seed(seed)  # which is nobody's business


class SeedsItsState(SeedsItself):
    """The same by another name, as of MONAI, without the first."""

    set_random_seed = None  # type: ignore[assignment]

    def set_random_state(self, seed: int | None = None, state: Any = None) -> SeedsItsState:
        _out_of_sight[id(self)] = random.Random(seed)
        return self


def jittered_sum(jitter: Jitter, rows: list[int]) -> Tensor:
    return torch.tensor(jitter(sum(rows)))


def draw(rng: Any) -> float:
    if isinstance(rng, torch.Generator):
        return float(torch.rand((), generator=rng))
    return float(rng.random())


class Drawing(Dataset[Tensor]):
    """Sends each index through transforms."""

    def __init__(self, *transforms: Callable[[float], float]) -> None:
        self.transforms = {"all": list(transforms)}
        self.myself = self  # a circle

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        value = float(index)
        for transform in self.transforms["all"]:
            value = transform(value)
        return torch.tensor([index, value], dtype=torch.float64)


MAKE: dict[str, Callable[[], Dataset[Tensor]]] = {
    "torch": lambda: Drawing(Jitter(torch.Generator().manual_seed(1))),
    "NumPy": lambda: Drawing(Jitter(numpy.random.default_rng())),
    "NumPy, legacy": lambda: Drawing(Jitter(numpy.random.RandomState(1))),
    "NumPy, Philox": lambda: Drawing(Jitter(numpy.random.Generator(numpy.random.Philox(1)))),
    "random": lambda: Drawing(Jitter(random.Random())),
    "several": lambda: Drawing(Jitter(random.Random(1)), Jitter(torch.Generator())),
    "slots": lambda: Drawing(OwnStream(random.Random(1))),
    "module": lambda: Drawing(nn.Sequential(JitterModule(random.Random(1)))),
    "partial": lambda: Drawing(functools.partial(Jitter.__call__, Jitter(random.Random(1)))),
    "bound method": lambda: Drawing(Jitter(random.Random(1)).__call__),
    "class": lambda: Drawing(OfClass()),
    "lazy": lambda: Drawing(Lazy()),
    "seeds itself": lambda: Drawing(SeedsItself()),
    "seeds its state": lambda: Drawing(SeedsItsState()),
    "subset": lambda: Subset(Drawing(Jitter(random.Random(1))), range(LENGTH)),
    "concatenated": lambda: ConcatDataset(
        [Drawing(Jitter(random.Random(1))), Drawing(Jitter(random.Random(2)))]
    ),
}


def source_of(name: str, **settings: Any) -> BatchSource:
    return source_over(MAKE[name](), **{"batch_size": 3, "keyed": "sample", **settings})


@pytest.mark.parametrize("name", sorted(MAKE))
def test_generators_are_keyed_by_sample(name: str) -> None:
    """What a sample is depends on no other one, so any stop and any batch size give the same."""
    whole = torch.cat(drain(source_of(name)))
    assert len(whole[:, 1].frac().unique()) > 2  # they draw
    for stop in (1, 3):
        first = source_of(name)
        taken = drain(first, stop)
        second = source_of(name, batch_size=1)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert torch.equal(torch.cat(taken + drain(second)), whole)


@pytest.mark.parametrize("name", ["NumPy", "lazy", "seeds itself"])
def test_generators_are_keyed_in_workers(name: str) -> None:
    whole = torch.cat(drain(source_of(name)))
    source = source_of(name, num_workers=2)
    assert torch.equal(torch.cat(drain(source)), whole)
    source.close()


def test_samples_and_epochs_and_generators_draw_differently() -> None:
    first = random.Random(1)
    source = source_over(Drawing(Jitter(first), Jitter(random.Random(1))))
    draws = torch.cat(drain(source))[:, 1].frac()
    source.finish_pass()
    assert len(torch.cat([draws, torch.cat(drain(source))[:, 1].frac()]).unique()) == 2 * LENGTH
    found = Generators({"dataset": Drawing(Jitter(first), Jitter(random.Random(1)))})
    found.seed(3)
    assert len({draw(generator) for generator in found.found.values()}) == 2


def test_a_collate_function_with_a_generator_is_keyed_by_batch() -> None:
    def make() -> BatchSource:
        jittered = functools.partial(jittered_sum, Jitter(random.Random(1)))
        return source_over(range(LENGTH), batch_size=3, collate_fn=jittered)

    check_resume(make, 4, [2])


@pytest.mark.parametrize("of_torch", [False, True])
def test_self_seeding_generator_is_keyed_by_batch_in_a_loader_of_the_users(of_torch: bool) -> None:
    class Loader:
        def __init__(self) -> None:
            self.data = Drawing(SeedsItself())

        def __iter__(self) -> Iterator[Tensor]:
            return (self.data[index] for index in range(LENGTH))

    def make() -> BatchSource:
        loader = DataLoader(Drawing(SeedsItself()), batch_size=3) if of_torch else Loader()
        return open_source(loader, split="train", seed=5)

    check_resume(make, 4, [2])


class Reorders(Drawing):
    """Seeding a dataset may change its order, which is no augmentation."""

    def set_random_seed(self, seed: int) -> None:
        raise AssertionError("it is no transform")


class TakesGenerators(SeedsItself):
    set_random_seed = None  # type: ignore[assignment]

    def set_random_state(self, random_generator: Any, py_random: Any) -> None:
        raise AssertionError("there are none to give")


class Unprinted(nn.Parameter):
    """Printing it would take its values from the device, and gather them from all ranks."""

    def __repr__(self, **options: Any) -> str:
        raise AssertionError("printed")


class Holder:
    def method(self) -> None:
        """Print the address of the object."""


def test_keys_of_a_mapping_that_are_objects_stand_for_the_same_generators_in_each_process() -> None:
    def looked() -> list[str]:
        """Return the paths of generators by a tensor, a module, an object, a function, and by keys that print as what they are."""
        holder = Holder()
        objects = (
            Unprinted(torch.rand(2)),
            nn.Linear(1, 1),
            holder,
            lambda: None,
            holder.method,
            (holder, 1),
            weakref.ref(holder),
        )
        keys = (*objects, functools.partial(holder.method), "flips", 3, (4, "here"), None)
        return list(Generators({"transform": {key: random.Random(1) for key in keys}}).found)

    numbered = [f"transform[#{number}]" for number in range(8)]
    assert looked() == [
        *numbered,
        *(f"transform[{key}]" for key in ("'flips'", "3", "(4, 'here')", "None")),
    ]


def _in_blocks_on_shards() -> list[str]:
    """Return the paths of generators that a model of a hundred blocks holds."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    model[0].noise = functools.reduce(lambda held, _: [held], range(8), random.Random(1))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    return list(Generators({name: vars(part) for name, part in model.named_modules()}).found)


def test_a_generator_of_a_model_with_many_blocks_on_shards_is_found() -> None:
    """What torch keeps of the blocks was looked through too, until the time of a look was over."""
    (found,) = run_processes(_in_blocks_on_shards, world_size=1, init_process_group=True)
    assert found == [f"0['noise']{'[0]' * 8}"]


def test_object_without_generators_is_left_alone() -> None:
    streams = [
        torch.default_generator,
        random.random,
        random.uniform,
        numpy.random.rand,
        numpy.random.normal,
    ]
    large: dict[str, Any] = {
        "samples": [object() for _ in range(100_000)],
        "names": ["a"] * 1_000_000,
    }
    large["again"] = large
    for held in (streams, large, Reorders(TakesGenerators())):
        found = Generators({"dataset": held})
        found.seed(3)
        assert not found


@pytest.mark.parametrize(
    "kind",
    [
        torch.Generator,
        random.Random,
        numpy.random.default_rng,
        numpy.random.RandomState,
        numpy.random.Philox,
    ],
)
def test_the_state_of_a_generator_comes_back(kind: Any) -> None:
    def drawn(generator: Any) -> float:
        return draw(
            numpy.random.Generator(generator)
            if isinstance(generator, numpy.random.BitGenerator)
            else generator
        )

    generator, other = kind(), kind()
    state = copy.deepcopy(generator_state(generator))
    assert (
        not isinstance(generator, numpy.random.RandomState) or state["bit_generator"] == "MT19937"
    )
    expected = [drawn(generator), drawn(generator)]
    set_generator_state(other, state)
    assert [drawn(other), drawn(other)] == expected
