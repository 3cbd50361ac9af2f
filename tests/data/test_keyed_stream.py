"""Iterable datasets: what they draw, in `__iter__` or item by item, comes back, with and without a state of their own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from support.datasets import check_resume, drain, read, source_over, stateful_loader
from support.toys import differences
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from danling.data import BatchSource, open_source

LENGTH = 22


class Share(IterableDataset[Tensor]):
    """Yields its order to each worker in turn, with draws of the global streams."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for index in self.order()[first::step]:
            yield torch.tensor(
                [index, torch.rand(()).item(), numpy.random.rand(), random.random()],
                dtype=torch.float64,
            )

    def order(self) -> list[int]:
        return list(range(LENGTH))


class Permutes(Share):
    def order(self) -> list[int]:
        return torch.randperm(LENGTH).tolist()


class PermutesByGenerator(Share):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def order(self) -> list[int]:
        return torch.randperm(LENGTH, generator=self.generator).tolist()


class ShufflesFiles(Share):
    def order(self) -> list[int]:
        files = list(range(LENGTH))
        random.shuffle(files)
        return files


class Told(Share):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Remembers(IterableDataset[Tensor]):
    """Keeps its place itself, and draws for each item."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < LENGTH:
            self.position += 1
            yield torch.tensor(
                [self.position, torch.rand(()).item(), random.random()], dtype=torch.float64
            )
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": numpy.int64(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


class IteratorRemembers(IterableDataset[Tensor]):
    """Returns an iterator that keeps its place and its order."""

    def __iter__(self) -> Iterator[Tensor]:
        return Place()


class Place:
    def __init__(self) -> None:
        self.order, self.position = torch.randperm(LENGTH), 0

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.position == LENGTH:
            raise StopIteration
        self.position += 1
        return torch.stack(
            [self.order[self.position - 1].double(), torch.rand((), dtype=torch.float64)]
        )

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = state["order"], state["position"]


KINDS = (Share, Permutes, PermutesByGenerator, ShufflesFiles, Told, Remembers, IteratorRemembers)
STREAMS: dict[str, Callable[[], IterableDataset[Tensor]]] = {kind.__name__: kind for kind in KINDS}


def source_of(name: str, kind: str, **settings: Any) -> BatchSource:
    data, options = STREAMS[name](), {"batch_size": 4, **settings}
    if kind == "built":
        return source_over(data, **options)
    loader = {"torch": TorchDataLoader, "stateful": stateful_loader}[kind](data, **options)
    return open_source(loader, split="train", seed=3)


def check(name: str, kind: str, stops: range, **settings: Any) -> None:
    whole = check_resume(lambda: source_of(name, kind, **settings), 14, stops)
    if name not in ("Share", "Remembers"):
        orders = [tuple(torch.cat(whole[begin : begin + 5])[:, 0].tolist()) for begin in (0, 5)]
        assert len(set(orders)) == 2


@pytest.mark.parametrize("kind", ["built", "torch", "stateful"])
@pytest.mark.parametrize("name", sorted(STREAMS))
def test_resumes_at_every_position(name: str, kind: str) -> None:
    check(name, kind, range(14))


@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("name", sorted(STREAMS))
def test_resume_after_the_last_batch_of_a_pass_leaves_the_same_place(
    name: str, batch_size: int
) -> None:
    """With a last batch that is full, and with one that is not, in which the end of the stream has been seen."""
    first, second = (
        source_of(name, "built", batch_size=batch_size, drop_last=False) for _ in range(2)
    )
    batches = -(-LENGTH // batch_size)
    assert len(drain(first, batches)) == batches
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    states = []
    for each in (first, second):
        assert drain(each) == []
        each.finish_pass()
        states.append(each.state_dict())
        each.close()
    assert differences(*states) == []


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "kind", "persistent"),
    [
        ("ShufflesFiles", "torch", True),
        ("Remembers", "built", False),
        *(
            pytest.param(name, kind, persistent, marks=_SLOW)
            for name in sorted(STREAMS)
            for kind in ("built", "torch", "stateful")
            for persistent in (False, True)
        ),
    ],
)
def test_resumes_with_workers(name: str, kind: str, persistent: bool) -> None:
    check(name, kind, range(2, 14, 5), num_workers=2, persistent_workers=persistent)


def test_workers_see_the_users_dataset() -> None:
    def divide(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.files = info.dataset.files[worker :: info.num_workers]

    class Files(IterableDataset[int]):
        def __init__(self) -> None:
            self.files = list(range(10))

        def __iter__(self) -> Iterator[int]:
            return iter(self.files)

    loader = TorchDataLoader(Files(), batch_size=None, num_workers=2, worker_init_fn=divide)
    source = open_source(loader, split="train", seed=3)
    assert sorted(drain(source)) == list(range(10))
    source.close()


def test_repeated_reading_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = source_of("Permutes", "built"), source_of("Permutes", "built")
    drain(first, 2)
    with caplog.at_level("WARNING", logger="danling"):
        second.load_state_dict(first.state_dict())
        read(second, 9)
    (record,) = caplog.records
    assert (
        "'train' (Permutes) cannot be positioned: its first 8 items of epoch 0 are read again"
        in record.getMessage()
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_undivided_iterable_draws_other_noise_on_each_rank_and_worker(workers: int) -> None:
    class Undivided(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            for index in range(8):
                yield torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)

    def read_by(rank: int) -> Tensor:
        source = source_over(Undivided(), rank, 2, batch_size=2, num_workers=workers)
        rows = torch.cat(drain(source))
        source.close()
        return rows

    first, second = read_by(0), read_by(1)
    copies = max(workers, 1)
    assert (
        sorted(first[:, 0].tolist())
        == sorted(second[:, 0].tolist())
        == sorted([*range(8)] * copies)
    )
    assert len(torch.cat([first[:, 1], second[:, 1]]).unique()) == 2 * 8 * copies
    assert torch.equal(read_by(0), first)


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_shorter_than_the_position_is_refused(workers: int) -> None:
    class Short(Share):
        def order(self) -> list[int]:
            return list(range(4))

    saved, short = (
        open_source(TorchDataLoader(data, batch_size=2, num_workers=workers), split="train", seed=5)
        for data in (Share(), Short())
    )
    drain(saved, 3)
    short.load_state_dict(saved.state_dict())
    saved.close()
    with pytest.raises(
        ValueError, match=r"split 'train' to have at least 6 items.*Received: 4 items\."
    ):
        list(short.batches())
    short.close()
