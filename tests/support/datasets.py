"""Datasets and an independent reference for the tests of loaders."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from danling.data import BatchSource, build_dataloader, open_source


def stateful_loader(*arguments: Any, **settings: Any) -> Any:
    """Return a loader of torchdata as a user makes one, without the warning that torchdata calls a deprecated function of torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(*arguments, **settings)


class Augmented(Dataset[Tensor]):
    """Rows of (index, draw of torch, draw of numpy, draw of random); counts the reads of this process."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        draws = [torch.rand(()).item(), float(numpy.random.randn()), random.random()]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


class BatchAugmented(Augmented):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[Tensor]):
    """Yields its numbers by an iterator that knows how far it is."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> StreamIterator:
        return StreamIterator(self.length)


class StreamIterator:
    """The numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return torch.tensor(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def share_of(loader: Any) -> dict[str, int]:
    """Return the share that the sampler of a loader takes, as `open_source` is told of it."""
    sampler = getattr(loader, "sampler", None)
    return {"rank": getattr(sampler, "rank", 0), "world_size": getattr(sampler, "num_replicas", 1)}


def drain(source: Any, batches: int | None = None) -> list[Any]:
    """Train on a source: read and commit so many batches, or all that are left."""
    taken: list[Any] = []
    if batches == 0:
        return taken
    for batch in source.batches():
        source.commit([batch])
        taken.append(batch.data)
        if len(taken) == batches:
            break
    return taken


def read(source: Any, batches: int) -> list[Any]:
    """Train on a source through so many batches, over the ends of passes."""
    taken: list[Any] = []
    while len(taken) < batches:
        batch = drain(source, 1)
        if not batch:
            source.finish_pass()
        taken += batch
    return taken


def source_over(
    data: Any, rank: int = 0, world_size: int = 1, *, seed: int = 3, **settings: Any
) -> BatchSource:
    """Return the batches of a loader that the library builds over a dataset to train on."""
    share: dict[str, Any] = {"split": "train", "seed": seed, "rank": rank, "world_size": world_size}
    return open_source(build_dataloader(data, settings, train=True, **share), **share)


def check_resume(make: Callable[[], Any], total: int, stops: Iterable[int]) -> list[Any]:
    """Check that so many batches are the same with a stop at each place, where another source takes over; return them."""
    source = make()
    whole = read(source, total)
    source.close()
    for stop in stops:
        torch.manual_seed(stop), random.seed(stop), numpy.random.seed(stop)
        first, second = make(), make()
        taken = read(first, stop)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        first.close()
        taken += read(second, total - stop)
        second.close()
        assert all(torch.equal(one, other) for one, other in zip(taken, whole, strict=True)), stop
    return whole


def ids(batches: list[Tensor]) -> list[int]:
    """Return the sample ids of batches of `Augmented`."""
    return [int(row[0]) for batch in batches for row in batch]


def reference_batches(
    order: list[int], batch_size: int, world: int, pad: bool
) -> list[list[list[int]]]:
    """Return batches as [global batch][rank] -> ids, dealt out one by one; `pad` says who gets a stand-in."""
    result = []
    for begin in range(0, len(order), batch_size * world):
        piece = order[begin : begin + batch_size * world]
        sizes = [0] * world
        for position in range(len(piece)):
            sizes[position % world] += 1
        parts, begin_of_part = [], 0
        for size in sizes:
            parts.append(piece[begin_of_part : begin_of_part + size] or (piece[:1] if pad else []))
            begin_of_part += size
        result.append(parts)
    return result
