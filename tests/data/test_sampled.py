"""Samplers of the user's: the order and the randomness of a sample come back, wherever a pass was left."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from support.datasets import Augmented, check_resume, drain, ids, read, share_of, stateful_loader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from danling.data import BatchSource, build_dataloader, open_source

LENGTH = 22


class InPlace:
    """Shuffles an array of its own in place, by NumPy's global stream, and says so."""

    def __init__(self) -> None:
        self.indices = numpy.arange(LENGTH)

    def __iter__(self) -> Iterator[int]:
        numpy.random.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"indices": self.indices}  # the object itself, which goes on changing

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.indices = state["indices"]


class CountsPasses:
    """Follows the number of the pass, and has no length."""

    passes = 0

    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.passes)
        yield from torch.randperm(LENGTH, generator=generator).tolist()


class Holds:
    """Draws little by little from a generator that it holds."""

    def __init__(self, generator: Any) -> None:
        self.held = {"generator": generator}

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(self.held["generator"].integers(LENGTH))


class Buckets:
    """Lists of indices by NumPy's global stream, from buckets."""

    def __init__(self) -> None:
        self.buckets = [list(range(10)), list(range(10, LENGTH))]

    def __iter__(self) -> Iterator[list[int]]:
        for bucket in map(list, self.buckets):
            numpy.random.shuffle(bucket)
            yield from (bucket[begin : begin + 4] for begin in range(0, len(bucket), 4))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "weighted, generator": lambda data: {
        "sampler": WeightedRandomSampler(
            torch.rand(LENGTH, generator=generator()).tolist(), 18, generator=generator()
        )
    },
    "distributed": lambda data: {
        "sampler": DistributedSampler(data, num_replicas=2, rank=1, seed=2)
    },
    "distributed, stateful": lambda data: {
        "sampler": StatefulDistributedSampler(data, num_replicas=2, rank=1)
    },
    "in place": lambda data: {"sampler": InPlace()},
    "counts passes": lambda data: {"sampler": CountsPasses()},
    "holds a NumPy generator": lambda data: {"sampler": Holds(numpy.random.default_rng(3))},
    "a list": lambda data: {"sampler": [5, 3, 1, 8, 9, 2, 5, 5, 0]},
    "batches with replacement": lambda data: {
        "batch_sampler": BatchSampler(
            RandomSampler(data, replacement=True, generator=generator()), 4, False
        )
    },
    "buckets": lambda data: {"batch_sampler": Buckets()},
}


def built(data: Any, rank: int = 0, world_size: int = 1, **settings: Any) -> Any:
    return build_dataloader(
        data, settings, split="train", train=True, seed=3, rank=rank, world_size=world_size
    )


def source_of(name: str, kind: str, **settings: Any) -> BatchSource:
    data = Augmented(LENGTH)
    options = {**SAMPLERS[name](data), **settings}
    if "sampler" in options:
        options["batch_size"] = 4
    loader = {"built": built, "torch": TorchDataLoader, "stateful": stateful_loader}[kind](
        data, **options
    )
    return open_source(loader, split="train", seed=3, **share_of(loader))


@pytest.mark.parametrize("kind", ["built", "torch", "stateful"])
@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_resumes_at_every_position(name: str, kind: str) -> None:
    check_resume(lambda: source_of(name, kind), 15, range(15))


def test_a_sample_drawn_twice_and_on_another_rank_is_augmented_anew() -> None:
    (batch,) = list(built(Augmented(4), batch_size=4, sampler=[2, 2, 2, 1]))
    assert ids([batch]) == [2, 2, 2, 1]
    other = next(iter(built(Augmented(4), rank=1, world_size=2, sampler=[2])))
    assert ids([other]) == [2]
    assert len({row[1].item() for row in (*batch, *other)}) == 5


def test_a_sampler_without_an_end() -> None:
    class Forever:
        def __iter__(self) -> Iterator[int]:
            while True:
                yield random.randrange(LENGTH)

    def make() -> BatchSource:
        return open_source(
            TorchDataLoader(Augmented(LENGTH), batch_size=4, sampler=Forever()),
            split="train",
            seed=3,
        )  # type: ignore[arg-type]

    check_resume(make, 40, [25])
    source = make()
    assert source.remaining_batches() is None and source.remaining_batches() is None


def test_samples_with_other_names_than_integers() -> None:
    class ByName(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            return torch.rand(1) + super().__getitem__(name)

    def make() -> BatchSource:
        data = ByName(a=torch.zeros(1), b=torch.ones(1), c=torch.ones(1) * 2)
        return open_source(TorchDataLoader(data, sampler=["b", "c", "a"]), split="train", seed=3)  # type: ignore[arg-type]

    assert check_resume(make, 6, [4])[0].item() > 1


def test_a_sampler_of_another_length_is_refused() -> None:
    first = source_of("weighted, generator", "built")
    drain(first, 2)
    loader = built(Augmented(LENGTH), batch_size=4, sampler=SubsetRandomSampler(range(9)))
    with pytest.raises(
        ValueError,
        match=r"'train' to have the length 18.*Received: SubsetRandomSampler of length 9",
    ):
        open_source(loader, split="train", seed=3).load_state_dict(first.state_dict())


def test_sampler_without_a_repeatable_order_is_refused() -> None:
    order = [1, 2, 3, 4, 5, 6, 7, 8]

    def make() -> BatchSource:
        loader = TorchDataLoader(
            Augmented(LENGTH), batch_size=2, sampler=(index for index in order)
        )  # type: ignore[arg-type]
        return open_source(loader, split="train", seed=3)

    first = make()
    drain(first, 2)
    order.reverse()
    second = make()
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        ValueError,
        match=r"to give the 2 batches of epoch 0 again.*Received: others from BatchSampler",
    ):
        drain(second)


class CountsInSilence(CountsPasses):
    """Counts its passes itself, and says nothing of it."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return super().__iter__()


def test_silently_changing_sampler_is_refused_within_a_later_epoch() -> None:
    def make() -> BatchSource:
        return open_source(
            TorchDataLoader(Augmented(LENGTH), 4, sampler=CountsInSilence()), split="train", seed=3
        )  # type: ignore[arg-type]

    first = make()
    read(first, 8)  # six batches of the first pass, and two of the next
    second = make()
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        ValueError,
        match=r"epoch 1 again.*Define set_epoch\(epoch\) on it.*or state_dict and load_state_dict",
    ):
        drain(second)


def test_set_epoch_of_a_loader_goes_to_the_beginning_of_a_pass() -> None:
    loader = built(range(6), sampler=list(range(6)), batch_size=2)
    source = open_source(loader, split="train", seed=0)
    drain(source, 2)
    loader.set_epoch(1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert (source.epoch, source.consumed, source.remaining_batches()) == (1, 0, 3)
